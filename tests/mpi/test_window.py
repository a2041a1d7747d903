"""Windows of several ranks: puts, gets and accumulated sums."""

import itertools
import threading

import ml_dtypes
import numpy as np
import pytest

from mpidist import Window, errors
from mpidist.mpi import world as start_mpi

SIZES = (0, 1, 7, 4096, (1 << 20) - 1, (1 << 20) + 3, 5 << 20)
DTYPES = ("i1", "u2", "i4", "u8", "f2", "f4", "f8", "g", "F", "D", "bfloat16")
PART = 6 << 20


@pytest.fixture(params=["shared", "rma"])
def kind(request):
    start_mpi()
    return getattr(Window, request.param)


@pytest.fixture
def window(world, kind):
    """Open a window of 6 MiB per rank. After a failure, no rank waits for the others in free()."""
    window = kind(world, PART)
    yield window
    window.free()


def pattern(size, seed):
    return (np.arange(size, dtype=np.uint32) * 31 + seed).astype(np.uint8)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("offset", [0, 4093])
def test_bytes_reach_every_rank(world, window, offset):
    wrong = []
    for size in SIZES:
        for target in range(world.size):
            # All ranks write at the same time, each to the next rank.
            if target == (world.rank + 1) % world.size:
                window.put(target, offset, pattern(size, target))
        world.Barrier()
        for target in range(world.size):
            out = np.full(size, 255, np.uint8)
            window.get(target, offset, out)
            if not np.array_equal(out, pattern(size, target)):
                wrong.append((size, target))
        window.sync()
        if not np.array_equal(window.local[offset : offset + size], pattern(size, world.rank)):
            wrong.append((size, "local"))
        world.Barrier()
    assert wrong == []


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", DTYPES)
def test_concurrent_sums(world, window, name):
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    counts = (0, 1, 1000, (1 << 20) // dtype.itemsize + 5)
    rounds, sums = 3, []
    for count in counts:
        offset = 5 * dtype.itemsize
        window.put(0, offset, np.zeros(count, dtype))
        world.Barrier()
        data = ((np.arange(count) + world.rank) % 7).astype(dtype)
        for _ in range(rounds):
            window.add(0, offset, data)
        world.Barrier()
        out = np.empty(count, dtype)
        window.get(0, offset, out)
        sums.append(out)
        world.Barrier()
    for count, out in zip(counts, sums, strict=True):
        parts = [(np.arange(count) + rank) % 7 for rank in range(world.size)]
        np.testing.assert_array_equal(out, (rounds * sum(parts)).astype(dtype))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_sums_of_small_integers_wrap(world, window, dtype):
    """Wrap like NumPy at every length. Vector code of some MPI libraries saturates instead."""
    bounds, counts, sums = np.iinfo(dtype), (*range(71), 1000, (1 << 20) + 5), []
    data = [np.resize([bounds.max, bounds.min, n + 1, 77], counts[-1]) for n in range(world.size)]
    data = [values.astype(dtype) for values in data]
    for count in counts:
        offset = 64 + np.dtype(dtype).itemsize * (count % 3)
        window.put(0, offset, np.zeros(count, dtype))
        world.Barrier()
        for _ in range(3):
            window.add(0, offset, data[world.rank][:count])
        world.Barrier()
        out = np.empty(count, dtype)
        window.get(0, offset, out)
        sums.append(out)
        world.Barrier()
    whole = sum(values.astype(int) for values in data) * 3
    for count, out in zip(counts, sums, strict=True):
        np.testing.assert_array_equal(out, whole[:count].astype(dtype))


@pytest.mark.ranks(1, 2, 3)
def test_every_number_is_given_once(world, window):
    target, times = world.size - 1, 500
    if world.rank == target:
        window.put(target, 8, np.zeros(1, np.int64))
    world.Barrier()
    mine = [window.fetch_add(target, 8, 2) for _ in range(times)]
    everybody = world.allgather(mine)
    last = window.fetch_add(target, 8, -1)
    world.Barrier()
    assert sorted(itertools.chain(*everybody)) == list(range(0, 2 * times * world.size, 2))
    assert mine == sorted(mine)
    assert 2 * times * world.size - world.size < last <= 2 * times * world.size


@pytest.mark.ranks(2)
def test_threads_of_several_ranks(world, window):
    """Use separate bytes for each thread, and a common counter and sum."""
    threads, rounds = 3, 40
    size = (1 << 20) + 1
    wrong, numbers = [], []

    def use(index):
        other = 1 - world.rank
        data, out = pattern(size, 7 * index + world.rank), np.empty(size, np.uint8)
        for _ in range(rounds):
            window.put(other, (1 + index) << 20 | 1 << 12, data[: 1 << 19])
            window.get(other, (1 + index) << 20 | 1 << 12, out[: 1 << 19])
            if not np.array_equal(out[: 1 << 19], data[: 1 << 19]):
                wrong.append(index)
            numbers.append(window.fetch_add(0, 0, 1))
            window.add(0, 64, np.ones(100))
            window.add(1, 1024, np.ones(3, np.float16))

    if world.rank == 0:
        window.put(0, 0, np.zeros(200))
        window.put(1, 1024, np.zeros(3, np.float16))
    world.Barrier()
    running = [threading.Thread(target=use, args=(index,)) for index in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(50)
    everybody = world.allgather(numbers)
    sums, halves = np.empty(100), np.empty(3, np.float16)
    window.get(0, 64, sums)
    window.get(1, 1024, halves)
    world.Barrier()
    total = threads * rounds * world.size
    assert wrong == []
    assert sorted(itertools.chain(*everybody)) == list(range(total))
    np.testing.assert_array_equal(sums, np.full(100, total))
    np.testing.assert_array_equal(halves, np.full(3, total))


@pytest.mark.ranks(3)
def test_parts_of_different_sizes(world, kind):
    sizes = (0, 100, 3 << 20)
    window = kind(world, sizes[world.rank])
    local = window.local.nbytes
    errors_seen = []
    for rank, size in enumerate(sizes):
        with pytest.raises(ValueError, match=f"rank {rank}, which has {size} bytes") as info:
            window.put(rank, size, np.zeros(1, np.uint8))
        errors_seen.append(info.value)
        window.put(rank, size, np.zeros(0, np.uint8))
    world.Barrier()
    if world.rank == 0:
        window.put(2, 1, pattern((3 << 20) - 1, 5))
    world.Barrier()
    out = np.empty((3 << 20) - 1, np.uint8)
    window.get(2, 1, out)
    world.Barrier()
    window.free()
    assert local == sizes[world.rank]
    np.testing.assert_array_equal(out, pattern((3 << 20) - 1, 5))


@pytest.mark.ranks(1, 2)
def test_use_after_free_and_wrong_ranks(world, kind):
    window = kind(world, 4096)
    for rank in (-1, world.size):
        with pytest.raises(ValueError, match=f"has no rank {rank}"):
            window.get(rank, 0, np.empty(1))
    window.free()
    window.free()
    for call in (
        lambda: window.get(0, 0, np.empty(1)),
        lambda: window.put(0, 0, np.empty(1)),
        lambda: window.add(0, 0, np.empty(1)),
        lambda: window.fetch_add(0, 0, 1),
        lambda: window.sync(),
        lambda: window.part(0),
    ):
        with pytest.raises(errors.FailedPreconditionError, match="was freed"):
            call()


@pytest.mark.ranks(2)
def test_memory_of_others_is_mapped_where_it_is_shared(world):
    start_mpi()
    shared, remote = Window.shared(world, 64), Window.rma(world, 64)
    shared.local[:] = world.rank
    shared.sync()
    world.Barrier()
    shared.sync()
    seen = int(shared.part(1 - world.rank)[5])
    with pytest.raises(errors.FailedPreconditionError, match="use get and put"):
        remote.part(1 - world.rank)
    assert not remote.local.any()
    world.Barrier()
    remote.free()
    shared.free()
    assert seen == 1 - world.rank


@pytest.mark.ranks(3)
def test_several_windows_freed_in_any_order(world, kind):
    """Free windows in the same order on all ranks, which is not the order of creation."""
    windows = [kind(world, 1 << 16) for _ in range(4)]
    for number, window in enumerate(windows):
        window.put((world.rank + 1) % world.size, 0, np.full(9, number))
    world.Barrier()
    for number in (2, 0, 3, 1):
        out = np.empty(9, int)
        windows[number].get(world.rank, 0, out)
        assert (out == number).all()
        windows[number].free()


@pytest.mark.ranks(2)
def test_sizes_that_cannot_be(world, kind):
    with pytest.raises(ValueError, match="cannot have -8 bytes"):
        kind(world, -8)
    with pytest.raises(TypeError):
        kind(world, 10.5)
    with pytest.raises(errors.ResourceExhaustedError):
        kind(world, 1 << 60)


@pytest.mark.ranks(1, 2)
def test_shared_memory_is_zero_at_first(world):
    """Check zeroed memory on a single rank, too, where the heap is full of old data."""
    from mpi4py import MPI

    rubbish = [np.full(1 << 16, 255, np.uint8) for _ in range(50)]
    del rubbish
    window = Window.shared(MPI.COMM_SELF, 1 << 16)
    assert not window.local.any()
    window.add(0, 0, np.ones(2, np.float16))
    assert list(window.local[:4].view(np.float16)) == [1, 1]
    assert window.fetch_add(0, 8, 3) == 0
    window.free()
