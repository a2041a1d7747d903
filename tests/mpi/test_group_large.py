"""More elements than a call of MPI counts on every library: beyond 2^31, in place."""

import numpy as np
import pytest

import mpidist as dist

COUNT = (1 << 31) + 4099
PLACES = [0, 1, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, COUNT - 1]

pytestmark = [pytest.mark.long, pytest.mark.ranks(2, timeout=300)]


@pytest.fixture
def group(world):
    yield dist.init_process_group()
    dist.destroy_process_group()


def assert_all(array, value):
    """In pieces: a comparison of all would need as much memory again."""
    for start in range(0, array.size, 1 << 28):
        assert (array[start : start + (1 << 28)] == value).all(), start


@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce(group, async_op):
    array = np.full(COUNT, group.rank() + 1, np.uint8)
    array[PLACES] = [10 * n + group.rank() for n in range(len(PLACES))]
    begun = group.all_reduce(array, async_op=async_op)
    if begun is not None:
        begun.wait()
    np.testing.assert_array_equal(array[PLACES], [20 * n + 1 for n in range(len(PLACES))])
    array[PLACES] = 3
    assert_all(array, 3)


def test_broadcast_and_messages(group):
    rank = group.rank()
    array = np.full(COUNT, 7 if rank else 0, np.uint8)
    group.broadcast(array, 1)
    assert_all(array, 7)
    if rank == 0:
        array[PLACES] = range(len(PLACES))
        group.send(array, 1)
    else:
        assert group.recv(array, 0) == 0
    np.testing.assert_array_equal(array[PLACES], range(len(PLACES)))
    array[PLACES] = 7
    assert_all(array, 7)


def test_all_gather(group):
    rank = group.rank()
    part = COUNT // 2
    whole = np.zeros(2 * part, np.uint8)
    whole[part * rank : part * (rank + 1)] = rank + 5
    group.all_gather_into_tensor(whole, whole[part * rank : part * (rank + 1)])
    assert_all(whole[:part], 5)
    assert_all(whole[part:], 6)


def test_reduce_scatter_and_all_to_all(group):
    rank = group.rank()
    half = COUNT // 2 + 1
    whole = np.full(2 * half, rank + 1, np.uint8)
    whole[half:] += 10
    part = np.zeros(half, np.uint8)
    group.reduce_scatter_tensor(part, whole)
    assert_all(part, 3 + 20 * rank)
    del part
    output = np.zeros_like(whole)
    group.all_to_all_single(output, whole)
    assert_all(output[:half], 1 + 10 * rank)
    assert_all(output[half:], 2 + 10 * rank)


def test_what_is_too_large(group):
    array = np.zeros(COUNT, np.uint8)
    with pytest.raises(ValueError, match="cannot be prepared: it moves more than 2147483647"):
        group.prepare("all_reduce", array)
    del array


def test_unequal_parts(group):
    given, taken = ([3, COUNT], [3, 3]) if group.rank() == 0 else ([3, 3], [COUNT, 3])
    source = np.full(sum(given), group.rank() + 1, np.uint8)
    source[given[0] :] += 10
    output = np.zeros(sum(taken), np.uint8)
    group.all_to_all_single(output, source, taken, given)
    assert_all(output[: taken[0]], 1 + 10 * group.rank())
    assert_all(output[taken[0] :], 2 + 10 * group.rank())
