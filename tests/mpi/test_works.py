"""Works of messages: many of them pending at once, and errors that leave others under way."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import numpy as np
import pytest

from mpidist import DebugLevel, ProcessGroup, get_debug_level, set_debug_level

PENDING = 200
MOST_THREADS = 4
PART = 1 << 17  # elements; a part of this size is a message of its own
LIMIT_S = 30
_received = []  # memory outlives its test, so that MPI may write into it for a lost request


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


async def await_all(works, pending):
    """Await works at the same time, and call a function once all of them are awaited."""

    async def result_of(work):
        return await work

    tasks = [asyncio.ensure_future(result_of(work)) for work in works]
    await asyncio.sleep(0)  # each task runs until its work is pending
    pending()
    return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)


def by_await(works, pending):
    return asyncio.run(await_all(works, pending))


def by_future(works, pending):
    futures = [work.get_future() for work in works]
    pending()
    return [future.result(LIMIT_S) for future in futures]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("results_of", [by_await, by_future])
def test_pending_works_share_threads(world, group, results_of):
    count = None
    if world.rank == 0:
        before = threading.active_count()
        arrays = np.zeros((PENDING, 1))
        works = [group.irecv(array, 1, tag=tag) for tag, array in enumerate(arrays)]

        def pending():
            nonlocal count
            count = threading.active_count() - before
            world.send(None, 1)

        senders = results_of(works, pending)
        assert senders == [1] * PENDING
        np.testing.assert_array_equal(arrays[:, 0], np.arange(PENDING))
    else:
        world.recv(source=0)
        for tag in range(PENDING):
            group.send(np.full(1, tag, float), 0, tag=tag)
    count = world.bcast(count)
    assert count <= MOST_THREADS


class Owner:
    """The owner of an array's memory, as long as the array or a view of it exists."""

    def __init__(self, memory):
        self.__array_interface__ = memory.__array_interface__


def start_and_fail(group, memory, timed):
    """Begin a gather that starts to receive from rank 2, and fails for rank 1.

    Returns:
        A weak reference to the owner of the array that receives from rank 2.
    """
    owner = Owner(memory)
    outputs = [np.zeros(PART), np.zeros(PART), np.asarray(owner)]
    step = group.prepare("gather", np.zeros(PART), outputs, 0)
    outputs[1].flags.writeable = False
    with pytest.raises(Exception, match=r"read-only|not writable"):
        (step if timed else step.start)()
    return weakref.ref(owner)


def uncompared_group(world, timeout):
    before = get_debug_level()
    set_debug_level(DebugLevel.OFF)
    try:
        return ProcessGroup(world.Dup(), "test", timeout=timeout)
    finally:
        set_debug_level(before)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("timed", [False, True], ids=["started", "with a time limit"])
def test_an_error_keeps_the_arrays_of_begun_requests(world, timed):
    """The group keeps the array that receives, or waits for it before it raises the error."""
    group = uncompared_group(world, LIMIT_S if timed else None)  # one rank does not call
    kept = None
    if world.rank == 0:
        memory = np.zeros(PART)
        _received.append(memory)
        with ThreadPoolExecutor(1) as pool:
            failing = pool.submit(start_and_fail, group, memory, timed)
            try:
                owner = failing.result(5)
            except TimeoutError:  # it waits for rank 2, which must send now
                owner = None
            gc.collect()
            kept = owner is None or owner() is not None
            world.send(None, 2)
            failing.result(LIMIT_S)
    elif world.rank == 2:
        world.recv(source=0)
        group.gather(np.full(PART, 2.0), None, 0, async_op=True).wait(LIMIT_S)
    kept = world.allgather(kept)[0]  # rank 0 makes progress until rank 2 has sent
    assert kept


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_large_reduce_is_made_of_pieces(world, group, dtype):
    """Every element has its own sum, also at the ends of the pieces of 4 MiB."""
    count = (9 << 20) // np.dtype(dtype).itemsize + 3
    own = (np.arange(count) % 1009 * (world.rank + 1)).astype(dtype)
    array = own.copy()
    group.reduce(array, group_dst=1, async_op=True).wait(LIMIT_S)
    if world.rank == 1:
        total = sum(range(1, world.size + 1))
        np.testing.assert_array_equal(array, np.arange(count, dtype="float64") % 1009 * total)
    else:
        np.testing.assert_array_equal(array, own)
