"""Operations that are coalesced, prepared and repeated, or called by several threads."""

import asyncio
import gc
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import mpidist as dist
from mpidist import ReduceOp, errors
from mpidist.group.coalescing import fuse


@pytest.fixture
def group(world):
    made = dist.init_process_group()
    yield made
    dist.destroy_process_group()


def arrays_of(rank):
    """Return arrays of several kinds that depend on the rank."""
    return [
        np.full(3, rank, np.float32),
        np.full((2, 2), rank + 0.5, np.float64),
        np.arange(10, dtype=np.float32)[::2] + rank,
        np.full(4, rank, np.float16),
        np.full(1 << 17, rank, np.float32),
        np.full((), rank, np.float32),
        np.zeros((0, 3), np.float32),
        np.full(3, rank, np.int64),
    ]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("async_ops", [False, True])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_all_reduces_together(group, async_ops, op):
    arrays = arrays_of(group.rank())
    with group.coalesce(async_ops) as begun:
        for array in arrays:
            assert group.all_reduce(array, op, async_op=async_ops) is None
    if async_ops:
        begun.wait()
    everyones = [arrays_of(rank) for rank in range(group.size())]
    ufunc = np.add if op == "sum" else np.maximum
    for number, array in enumerate(arrays):
        values = [np.asarray(given[number], np.float64) for given in everyones]
        np.testing.assert_array_equal(array.astype(np.float64), ufunc.reduce(values))


@pytest.mark.ranks(2, 3)
def test_averages_and_factors_together(group):
    mean, weighed = np.full(3, group.rank(), np.float32), np.ones(2, np.float32)
    with group.coalesce():
        group.all_reduce(mean, "avg")
        group.all_reduce(weighed, ReduceOp.PREMUL_SUM(group.rank() + 1))
    np.testing.assert_allclose(mean, (group.size() - 1) / 2)
    np.testing.assert_array_equal(weighed, sum(range(1, group.size() + 1)))


@pytest.mark.ranks(1, 2, 4)
def test_all_kinds_together(group):
    rank, size = group.rank(), group.size()
    sent = [np.full(2, number, np.int32) for number in (7, 8)]
    for array in sent:
        array.flags.writeable = rank != 0  # the root's array may be read-only
        if rank:
            array[:] = -1
    gathered, scattered = np.empty((size, 2)), np.empty(2)
    with dist.coalescing_manager():
        for array in sent:
            dist.broadcast(array, 0)
        dist.all_gather_into_tensor(gathered, np.full(2, float(rank)))
        dist.reduce_scatter_tensor(scattered, np.arange(2.0 * size))
        dist.barrier()
    assert [list(array) for array in sent] == [[7, 7], [8, 8]]
    np.testing.assert_array_equal(gathered, np.repeat(np.arange(size), 2).reshape(size, 2))
    np.testing.assert_array_equal(scattered, size * np.arange(2.0 * size).reshape(size, 2)[rank])


@pytest.mark.ranks(2)
def test_small_ones_become_one(group):
    small = [np.zeros(4, np.float32) for _ in range(5)]
    with group._submission.collecting() as ops:
        for array in small:
            group.all_reduce(array)
        group.all_reduce(np.zeros(1 << 20))
        group.broadcast(small[0], 0)
        group.broadcast(small[1], 1)
        group.broadcast(small[2], 0)
    assert [(op.name, op.recv.size) for op in fuse(ops)] == [
        ("all_reduce", 20),
        ("all_reduce", 1 << 20),
        ("broadcast", 8 * 4),  # as bytes
        ("broadcast", 4),
    ]


@pytest.mark.ranks(2)
def test_fused_operations_take_bounded_memory(group):
    rank = group.rank()
    arrays = [np.full(8192, n + rank, np.float32) for n in range(20)]
    large = np.full(8193, rank, np.float32)
    with group._submission.collecting() as ops:
        for array in (*arrays, large):
            group.all_reduce(array)
    assert [op.recv.nbytes >> 15 for op in fuse(ops)] == [8, 8, 4, 1]
    group.all_reduce_coalesced([*arrays, large])
    for n, array in enumerate(arrays):
        np.testing.assert_array_equal(array, 2 * n + 1)
    np.testing.assert_array_equal(large, 1)


@pytest.mark.ranks(2)
def test_a_block_within_a_block(group):
    array, others = np.ones(3), [np.ones(2), np.ones(2, np.int32)]
    with group.coalesce(async_ops=True) as outer:
        group.all_reduce(array)
        assert group.all_reduce_coalesced(others, async_op=True) is None
        np.testing.assert_array_equal(array, 1)
    outer.wait()
    for one in (array, *others):
        np.testing.assert_array_equal(one, 2)


@pytest.mark.ranks(2)
def test_a_block_that_raises_begins_nothing(group):
    array = np.ones(2)

    def several():
        with group.coalesce():
            group.all_reduce(array)
            group.all_reduce(np.array(["no number"]))

    with pytest.raises(TypeError, match="cannot be reduced"):
        several()
    np.testing.assert_array_equal(array, 1)
    group.all_reduce(array)
    np.testing.assert_array_equal(array, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["?", "f2", ">f4", "bfloat16", "f8"])
def test_rows_of_one_array_together(group, dtype):
    whole = np.zeros((3, 4), getattr(ml_dtypes, dtype, dtype))
    whole[:, group.rank()] = 1
    group.all_reduce_coalesced(list(whole))
    np.testing.assert_array_equal(whole.astype("f8"), [[1, 1, 0, 0]] * 3)
    whole[:] = group.rank()
    with group.coalesce():
        for row in whole:
            group.broadcast(row, 1)
    np.testing.assert_array_equal(whole.astype("f8"), 1)


@pytest.mark.ranks(2)
def test_what_cannot_be_collected(group):
    with group.coalesce(), pytest.raises(ValueError, match=r"of objects .* needs its result at o"):
        group.all_gather_object([None, None], 1)
    with group.coalesce() as begun:
        pass
    with pytest.raises(ValueError, match="give async_ops=True"):
        begun.wait()
    with group.coalesce(async_ops=True) as begun:
        pass
    assert begun.wait()
    with (
        pytest.raises(ValueError, match="device has no meaning"),
        dist.coalescing_manager(device="cpu"),
    ):
        pass


@pytest.mark.ranks(2)
def test_those_outside_collect_nothing(group):
    alone = dist.new_group([0])
    array = np.ones(1)
    if dist.get_rank() == 0:
        with dist.coalescing_manager(alone):
            dist.all_reduce(array, group=alone)
    else:
        with pytest.warns(UserWarning, match="not a member"), dist.coalescing_manager(alone):
            pass
    np.testing.assert_array_equal(array, 1)


@pytest.mark.ranks(2)
def test_what_has_memory_in_common_is_not_collected(group):
    array = np.ones(6)

    def twice(first, second):
        with group.coalesce():
            group.all_reduce(first)
            group.all_reduce(second)

    for first, second in ((array, array), (array[:4], array[2:]), (array[5:], array)):
        with pytest.raises(ValueError, match="all_reduce and all_reduce use the same memory"):
            twice(first, second)
    np.testing.assert_array_equal(array, 1)
    gathered = np.empty((2, 2, 3))
    with group.coalesce():  # inputs may overlap, and outputs may be adjacent
        group.all_gather_into_tensor(gathered[0], array[:3])
        group.all_gather_into_tensor(gathered[1], array[:3])
        group.all_reduce(array[3:])
    np.testing.assert_array_equal(gathered, 1)
    np.testing.assert_array_equal(array, [1, 1, 1, 2, 2, 2])


@pytest.mark.ranks(2)
def test_what_is_not_begun_changes_nothing(group):
    array = np.ones(3)
    with pytest.raises(ValueError, match="would work on copies"):
        group.prepare("all_reduce", array, ReduceOp.PREMUL_SUM(2.0))

    def leave():
        with group.coalesce():
            group.all_reduce(array, ReduceOp.PREMUL_SUM(2.0))
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    np.testing.assert_array_equal(array, 1)


@pytest.mark.ranks(2)
def test_factors_leave_the_memory_of_inputs_alone(group, tmp_path):
    source = np.memmap(tmp_path / "numbers", "f8", "w+", shape=(4,))
    source[:] = 1
    part = np.empty(2)
    group.reduce_scatter_tensor(part, source, ReduceOp.PREMUL_SUM(3.0))
    np.testing.assert_array_equal(part, 6)
    np.testing.assert_array_equal(source, 1)
    group.reduce(source, 0, ReduceOp.PREMUL_SUM(3.0))
    np.testing.assert_array_equal(source, 6 if group.rank() == 0 else 1)


@pytest.mark.ranks(2)
def test_time_limits_of_what_is_collected(group):
    """Start all operations before the time limit passes, so that none is missing afterwards."""
    arrays = [np.ones(3), np.ones(3, np.float32), np.ones(1 << 16)]
    note = np.zeros(1)

    def together():
        with group.coalesce():
            for array in arrays:
                group.all_reduce(array)

    if group.rank() == 0:
        group.set_timeout(0.2)
        with pytest.raises(errors.DeadlineExceededError):
            together()
        with pytest.raises(errors.GroupBrokenError, match="coalesced operations"):
            group.barrier()
        group.set_timeout(60)
        group.send(note, 1)
        group.recv(note, 1)
    else:
        group.recv(note, 0)
        group.set_timeout(60)
        together()
        group.send(note, 0)
    while True:  # refused until all operations have ended here, too
        try:
            group.barrier(timeout=60)
            break
        except errors.GroupBrokenError:
            continue
    for array in arrays:
        np.testing.assert_array_equal(array, 2)


@pytest.mark.ranks(2)
def test_a_time_limit_within_an_operation_on_objects(group):
    """Break the group: the other ranks continue with steps that this rank never begins."""
    note = np.zeros(1)
    if group.rank() == 0:
        group.set_timeout(0.2)
        with pytest.raises(errors.DeadlineExceededError):
            group.all_gather_object([None, None], b"x" * 2000)
        group.set_timeout(5)
        for use in (group.barrier, lambda: group.all_gather_object([None, None], 1)):
            with pytest.raises(errors.GroupBrokenError, match=r"its time limit, .* a new group"):
                use()
        group.send(note, 1)
    else:
        group.recv(note, 0)
        group.set_timeout(1)
        with pytest.raises(errors.DeadlineExceededError):
            group.all_gather_object([None, None], b"x" * 2000)
    dist.destroy_process_group()
    for number in range(20):  # the leftovers disturb no other group
        dist.init_process_group()
        alone = dist.new_group([0])
        if dist.get_rank() == 0:
            alone.free()
        objects = [None, None]
        dist.all_gather_object(objects, "y" * 100 * number)
        assert objects == ["y" * 100 * number] * 2
        dist.destroy_process_group()
    dist.init_process_group()


@pytest.mark.ranks(2)
def test_a_time_limit_within_the_second_half_of_a_gather(world):
    """Time out in the second half: the rest of a large object comes in a message, here never."""
    group = dist.ProcessGroup(world.Dup(), "halves")
    if group.rank() == 0:
        group.set_timeout(0.3)
        with pytest.raises(errors.DeadlineExceededError):
            group.gather_object(1, [None, None], group_dst=0)
        with pytest.raises(errors.GroupBrokenError, match=r"its time limit, .* a new group"):
            group.barrier()
    else:
        group.set_timeout(60)
        group._submission.run_message_of_collective = lambda op: None
        group.gather_object(b"x" * 2000, group_dst=0)


@pytest.mark.ranks(2)
def test_limits_of_single_barriers(group):
    note = np.zeros(1)
    step = group.prepare("barrier", timeout=0.1)
    if group.rank() == 0:
        with pytest.raises(errors.DeadlineExceededError):
            step()
        group.send(note, 1)
        group.recv(note, 1)
    else:
        group.recv(note, 0)
        group.barrier(timeout=60)
        group.send(note, 0)
    receive = group.prepare("recv", note, 1 - group.rank(), timeout=0.1)
    with pytest.raises(errors.DeadlineExceededError):
        receive()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["strided", "half", "collected", "sent"])
def test_handles_may_be_dropped(group, kind):
    """Keep arrays until MPI is done. Results arrive although the handles are gone."""
    note, peer = np.zeros(1), 1 - group.rank()
    big = np.ones((100_000, 2), np.float16 if kind == "half" else np.float64)
    pieces = [np.ones(30, np.float16) for _ in range(30)]
    if group.rank() == 1:  # the first rank is far ahead
        group.recv(note, 0, tag=1)
    if kind == "collected":
        with group.coalesce(async_ops=True):
            for piece in pieces:
                group.all_reduce(piece)
    elif kind == "sent" and group.rank() == 0:
        group.isend(big[:, 0], peer)
    elif kind == "sent":
        group.irecv(big[:, 0], peer)
    else:
        group.all_reduce(big[:, 0], async_op=True)
    gc.collect()
    rubbish = [np.full(100_000, 7.0) for _ in range(6)]
    if group.rank() == 0:
        group.send(note, 1, tag=1)
    if kind != "sent":
        group.all_reduce(note, async_op=True).wait(60)
    group.monitored_barrier(60)
    # A later operation may end before the dropped one.
    deadline, arrived = time.monotonic() + 60, np.zeros(1)
    while not arrived.all():
        results = {"collected": pieces, "sent": 2}.get(kind, big[:, 0])
        arrived[:] = np.equal(results, 2).all()
        group.all_reduce(arrived, op="min", async_op=True).wait(60)
        assert time.monotonic() < deadline, "the results have not arrived"
    del rubbish
    if kind == "collected":
        np.testing.assert_array_equal(pieces, 2)
    elif kind != "sent":
        np.testing.assert_array_equal(big[:, 0], 2)
    np.testing.assert_array_equal(big[:, 1], 1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_repeated(group):
    rank, size = group.rank(), group.size()
    array, mean = np.empty(5), np.empty(2, np.float32)
    gathered, own = np.empty((size, 3)), np.empty(3)
    swapped, given = np.empty(size, np.int64), np.empty(size, np.int64)
    part = np.empty(2)
    whole = np.empty((size, 2))
    sent = np.empty(2, np.uint16)
    add = group.prepare("all_reduce", array)
    average = group.prepare("all_reduce", mean, op="avg")
    gather = group.prepare("all_gather_into_tensor", gathered, own)
    swap = group.prepare("all_to_all_single", swapped, given)
    reduce_scatter = group.prepare("reduce_scatter_tensor", part, whole, "max")
    broadcast = group.prepare("broadcast", sent, size - 1)
    barrier = group.prepare("barrier")
    for turn in range(5):
        array[:] = mean[:] = own[:] = rank + turn
        given[:] = 10 * rank + np.arange(size) + turn
        whole[:] = rank * turn + np.arange(2 * size).reshape(size, 2)
        sent[:] = 100 * rank + turn
        for step in (add, average, gather, swap, reduce_scatter, broadcast, barrier):
            if turn % 2:
                step()
            else:
                step.start().wait()
        ranks = np.arange(size)
        np.testing.assert_array_equal(array, (ranks + turn).sum())
        np.testing.assert_allclose(mean, (ranks + turn).mean())
        np.testing.assert_array_equal(gathered, np.repeat(ranks + turn, 3).reshape(size, 3))
        np.testing.assert_array_equal(swapped, 10 * ranks + rank + turn)
        np.testing.assert_array_equal(part, (size - 1) * turn + 2 * rank + np.arange(2))
        np.testing.assert_array_equal(sent, 100 * (size - 1) + turn)
        group.all_reduce(own)  # other operations may come in between


@pytest.mark.ranks(2)
def test_repeated_messages(group):
    rank = group.rank()
    numbers = np.empty(3, np.int32)
    step = group.prepare("send", numbers, 1, tag=3) if rank == 0 else None
    step = step or group.prepare("recv", numbers, tag=3)  # from any source
    for turn in range(4):
        numbers[:] = turn if rank == 0 else -1
        if turn % 2:
            step()
        else:
            work = step.start()
            work.wait()
            assert rank == 0 or work.result() == 0
        np.testing.assert_array_equal(numbers, turn)


@pytest.mark.ranks(2)
def test_repeated_on_one_side(group):
    """Match a prepared operation with plain operations of the others."""
    array = np.ones(3)
    step = group.prepare("all_reduce", array)
    for _ in range(3):
        if group.rank() == 0:
            step()
        else:
            group.all_reduce(array)
    np.testing.assert_array_equal(array, 8)


@pytest.mark.ranks(2)
def test_what_cannot_be_repeated(group):
    cases = [
        ("all_reduce", np.zeros((4, 4))[:, ::2]),
        ("all_reduce", np.zeros(3, np.float16)),
        ("all_reduce", np.zeros(3), ReduceOp.PREMUL_SUM(2)),
        ("all_gather", [np.zeros(3), np.zeros(3)], np.zeros(3)),
        ("broadcast", np.zeros(3, ">f4")[::2], 0),
        ("send", np.zeros((4, 4)).T[1:], 1 - group.rank()),
    ]
    for name, *arguments in cases:
        with pytest.raises(ValueError, match="would work on copies"):
            group.prepare(name, *arguments)
    with pytest.raises(ValueError, match="'all_gather_object' cannot be prepared"):
        group.prepare("all_gather_object", [None], 1)
    with pytest.raises(TypeError):
        group.prepare("all_reduce")
    with pytest.raises(ValueError, match="world rank 5 is not in group"):
        group.prepare("broadcast", np.zeros(1), 5)
    array = np.ones(2)
    step = group.prepare("all_reduce", array)
    if group.rank() == 0:
        work = step.start()
        for use in (step, step.start):
            with pytest.raises(ValueError, match="still pending"):
                use()
        group.send(np.zeros(1), 1)
    else:
        group.recv(np.zeros(1), 0)
        work = step.start()
    work.wait()
    np.testing.assert_array_equal(array, 2)


@pytest.mark.ranks(2)
def test_a_repeated_operation_past_its_limit(group):
    array, note = np.ones(1), np.zeros(1)
    step = group.prepare("all_reduce", array)
    if group.rank() == 0:
        group.set_timeout(0.2)
        with pytest.raises(errors.DeadlineExceededError, match="stays pending"):
            step()
        for use in (step, step.start, group.barrier):
            with pytest.raises(errors.GroupBrokenError):
                use()
        group.set_timeout(None)
        group.send(note, 1)
        group.recv(note, 1)
    else:
        group.recv(note, 0)
        step.start().wait(60)
        group.send(note, 0)
    step()
    np.testing.assert_array_equal(array, 4)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("async_op", [False, True])
def test_many_threads(group, async_op):
    """Let threads take turns. The order of the threads is free, as all their calls are alike."""
    threads, turns = 4, 50
    results = []

    def work():
        for _ in range(turns):
            array = np.ones(100)
            begun = group.all_reduce(array, async_op=async_op)
            if begun is not None:
                begun.wait()
            results.append(array.sum())

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert results == [100 * group.size()] * (threads * turns)


@pytest.mark.ranks(1, 2)
def test_await(group):
    array = np.ones(2)

    async def several():
        one = group.all_reduce(array, async_op=True)
        two = group.all_gather_into_tensor(whole, np.full(1, group.rank()), async_op=True)
        ticks = 0

        async def tick():
            nonlocal ticks
            ticks += 1

        await asyncio.gather(one, two, tick())
        assert ticks == 1
        assert one.is_completed()
        if group.size() == 2:
            peer = 1 - group.rank()
            sending = group.isend(array, peer)
            assert await group.irecv(array.copy(), peer) == peer
            await sending

    whole = np.empty(group.size(), np.int64)
    asyncio.run(several())
    np.testing.assert_array_equal(array, group.size())
    np.testing.assert_array_equal(whole, range(group.size()))


@pytest.mark.ranks(1)
def test_await_an_error(world):
    failing = dist.Work("read")
    failing.complete(error=OSError("no such disk"))

    async def wait():
        await failing

    with pytest.raises(OSError, match="no such disk"):
        asyncio.run(wait())


@pytest.mark.ranks(2)
def test_a_callback_begins_the_next(group):
    """Start an operation in a callback. The calling thread may be about to start another."""
    first, second, third = np.ones(2), np.ones(2), np.ones(2)
    begun = []
    work = group.all_reduce(first, async_op=True)
    work.add_done_callback(lambda _: begun.append(group.irecv(second, 1 - group.rank())))
    group.monitored_barrier(60)
    while not begun:
        group.isend(third, 1 - group.rank(), tag=1).wait(60)
        group.irecv(np.empty(2), 1 - group.rank(), tag=1).wait(60)
        group.all_reduce(np.ones(1), async_op=True).wait(60)
    group.send(np.full(2, 7.0), 1 - group.rank())
    begun[0].wait(60)
    np.testing.assert_array_equal(first, 2)
    np.testing.assert_array_equal(second, 7)


@pytest.mark.ranks(1)
def test_a_callback_that_takes_a_turn_within_a_turn(group):
    array, begun = np.ones(2), []
    work = group.all_reduce(array, async_op=True)
    work.add_done_callback(lambda _: begun.append(group.all_reduce(array, async_op=True)))
    group.all_reduce(np.ones(1), async_op=True).wait(60)  # notices the end of the first
    begun[0].wait(60)
