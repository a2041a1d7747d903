"""send, recv, isend and irecv of a process group."""

import ml_dtypes
import numpy as np
import pytest

from mpidist import ProcessGroup
from mpidist.errors import DistBackendError

DTYPES = [*"?bHlQefdgFD", ml_dtypes.bfloat16, "M8[s]", "S5"]


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


def values_of(rank, dtype, shape=(5, 4)):
    data = np.random.default_rng(rank).integers(0, 100, shape)
    return data.astype(np.int64 if np.dtype(dtype).kind == "M" else dtype).astype(dtype)


def neighbours(group):
    """World ranks before and after this one, in a ring."""
    ranks, here = group.ranks, group.rank()
    return ranks[here - 1], ranks[(here + 1) % len(ranks)]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ring(group, dtype):
    before, after = neighbours(group)
    sent, expected = values_of(group.rank(), dtype), values_of(before, dtype)
    received = []
    for read, write in ((lambda a: a, lambda a: a), (np.asfortranarray, lambda a: a[::-1, ::-1])):
        into = write(np.zeros_like(sent))
        work = group.isend(read(sent), after, tag=3)
        assert group.recv(into, before, tag=3) == before
        assert work.wait()
        received.append(into)
    for into in received:
        np.testing.assert_array_equal(into, expected)


@pytest.mark.ranks(2)
def test_strided_memory_is_written_only_where_it_is_received(group):
    memory = np.full((6, 6), -1.0)
    if group.rank() == 0:
        group.send(np.arange(9.0).reshape(3, 3).T, 1)
        return
    group.recv(memory[::2, 1::2], 0)
    expected = np.full((6, 6), -1.0)
    expected[::2, 1::2] = np.arange(9.0).reshape(3, 3).T
    np.testing.assert_array_equal(memory, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("size", [0, 1, 1000, 65_537, 3 << 20])
def test_sizes(group, size):
    other = 1 - group.rank()
    sent = np.arange(size, dtype=np.float32) + group.rank()
    into = np.empty_like(sent)
    blocking = np.empty_like(sent)
    work = group.irecv(into, other)
    group.isend(sent, other).wait()
    assert work.result() == other
    # One after the other: large messages wait for their receiver.
    if group.rank() == 0:
        group.send(sent, other)
        group.recv(blocking, other)
    else:
        group.recv(blocking, other)
        group.send(sent, other)
    np.testing.assert_array_equal(into, np.arange(size, dtype=np.float32) + other)
    np.testing.assert_array_equal(blocking, into)


@pytest.mark.ranks(2)
def test_tags_tell_messages_apart(group):
    if group.rank() == 0:
        works = [group.isend(np.array([tag]), 1, tag=tag) for tag in (5, 0, 9, 7)]
        for work in works:
            work.wait()
        return
    got = []
    for tag in (7, 9, 0, 5):
        into = np.zeros(1, int)
        group.recv(into, 0, tag=tag)
        got.append(int(into[0]))
    assert got == [7, 9, 0, 5]


@pytest.mark.ranks(2)
def test_messages_of_one_tag_keep_their_order(group):
    if group.rank() == 0:
        for number in range(200):
            group.send(np.full(1 + number % 7, number), 1)
        return
    got = []
    for number in range(200):
        into = np.empty(1 + number % 7, int)
        group.recv(into, 0)
        got.append(into)
    for number, into in enumerate(got):
        assert (into == number).all()


@pytest.mark.ranks(2, 3)
def test_from_any_source(group):
    if group.rank():
        group.send(np.array([group.rank()]), 0, tag=1)
        group.isend(np.array([group.rank()]), group_dst=0, tag=2).wait()
        return
    senders = {1: [], 2: []}
    for _ in range(1, group.size()):
        into = np.zeros(1, int)
        senders[1].append((group.recv(into, tag=1), int(into[0])))
    for _ in range(1, group.size()):
        into = np.zeros(1, int)
        senders[2].append((group.irecv(into, tag=2).result(), int(into[0])))
    everybody = [(rank, rank) for rank in range(1, group.size())]
    assert sorted(senders[1]) == everybody
    assert sorted(senders[2]) == everybody


@pytest.mark.ranks(2, 3)
def test_from_any_source_within_a_time_limit(group):
    if group.rank():
        group.send(np.array([group.rank()]), 0)
        return
    got = []
    for _ in range(1, group.size()):
        into = np.zeros(1, int)
        got.append((group.recv(into, timeout=30), int(into[0])))
    assert sorted(got) == [(rank, rank) for rank in range(1, group.size())]


@pytest.mark.ranks(3)
def test_ranks_of_the_world_and_of_the_group(world):
    here = world.rank
    comm = world.Create_group(world.group.Incl([2, 1])) if here else None
    if comm is None:
        return
    group = ProcessGroup(comm, "last two, backwards")
    into = np.zeros(1, int)
    if here == 2:
        group.send(np.array([10]), dst=1)
        group.send(np.array([20]), group_dst=1)
        assert group.recv(into, src=1) == 1
        assert group.recv(into) == 1
    else:
        senders = [group.recv(into, src=2), group.recv(into, group_src=0)]
        group.send(into, dst=2)
        group.isend(into, group_dst=0).wait()
        assert senders == [2, 2]
    assert into[0] == 20


@pytest.mark.ranks(2)
def test_arguments_that_cannot_be(group):
    here = group.rank()
    into = np.zeros(1)
    for call in (group.send, group.isend):
        with pytest.raises(ValueError, match=f"rank {here} cannot send to itself"):
            call(into, here)
    for call in (group.recv, group.irecv):
        with pytest.raises(ValueError, match=f"rank {here} cannot receive from itself"):
            call(into, group_src=here)
    with pytest.raises(ValueError, match="dst, the rank of the other side, is missing"):
        group.send(into)
    with pytest.raises(ValueError, match="world rank 2 is not in group"):
        group.send(into, 2)
    with pytest.raises(ValueError, match="group rank -1 is not in group"):
        group.recv(into, group_src=-1)
    with pytest.raises(ValueError, match="not both"):
        group.isend(into, 1 - here, group_dst=1 - here)
    for call in (group.send, group.irecv):
        with pytest.raises(ValueError, match="tag -1 cannot be used"):
            call(into, 1 - here, tag=-1)
    with pytest.raises(ValueError, match="world rank '0' is not in group"):
        group.send(into, "0")
    into.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        group.recv(into, 1 - here)
    with pytest.raises(TypeError, match="Python objects"):
        group.send(np.array(["text"], object), 1 - here)


@pytest.mark.ranks(2)
def test_receive_with_a_time_limit(group, world):
    into = np.zeros(1)
    if group.rank() == 0:
        with pytest.raises(
            TimeoutError, match=r"recv from rank 1 of group 'test' .* within 0.05 s on rank 0"
        ):
            group.recv(into, 1, tag=4, timeout=0.05)
        world.send("late", 1)
        world.recv(source=1)
        # The receive that was given up takes the message; the group goes on all the same.
        second = np.zeros(1)
        assert group.recv(second, 1, tag=4, timeout=30) == 1
        assert (into[0], second[0]) == (1.0, 2.0)
    else:
        world.recv(source=0)
        group.send(np.array([1.0]), 0, tag=4)
        group.send(np.array([2.0]), 0, tag=4)
        world.send("sent", 0)


@pytest.mark.ranks(2)
def test_many_at_once_in_both_directions(group):
    other = 1 - group.rank()
    into = [np.zeros(1 + 997 * n, np.int32) for n in range(60)]
    receiving = [group.irecv(array, other, tag=n) for n, array in enumerate(into)]
    sending = [
        group.isend(np.full(1 + 997 * n, n + 1000 * group.rank(), np.int32), other, tag=n)
        for n in reversed(range(60))
    ]
    for work in [*sending, *receiving]:
        work.wait(30)
    for n, array in enumerate(into):
        assert (array == n + 1000 * other).all()


@pytest.mark.ranks(2)
def test_a_message_longer_than_its_array(group):
    if group.rank() == 0:
        group.send(np.ones(8), 1)
    else:
        with pytest.raises(DistBackendError, match="longer than the array that receives it"):
            group.recv(np.ones(4), 0)
