"""Operations that take their time: Work, time limits, and a group past its limit."""

import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from _cases.jobs import run_ranks

from mpidist import DistError, GroupBrokenError, ProcessGroup, errors, gather_works

LIMIT_S = 30.0


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


def until_it_works(call):
    """Call again and again while the group is broken; what it gives in the end."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return call()
        except GroupBrokenError:
            assert time.monotonic() < deadline, "the group stays broken"


@pytest.mark.ranks(2, 3)
def test_all_collectives_as_work(group):
    here, count = group.rank(), group.size()
    own = np.full(4, here + 1.0)
    summed, averaged, rooted, copied = own.copy(), own.copy(), own.copy(), own.copy()
    strided = np.zeros((4, 2))
    strided[:, 0] = own
    gathered = [np.zeros(4) for _ in range(count)]
    works = [
        group.all_reduce(summed, async_op=True),
        group.all_reduce(averaged, "avg", async_op=True),
        group.reduce(rooted, count - 1, async_op=True),
        group.broadcast(copied, count - 1, async_op=True),
        group.all_gather(gathered, own, async_op=True),
        group.all_reduce(strided[:, 0], "max", async_op=True),
        group.barrier(async_op=True),
    ]
    results = [work.wait(LIMIT_S) for work in reversed(works)]  # in any order
    assert results == [True] * 7
    assert all(work.is_completed() and work.is_success() for work in works)
    total = count * (count + 1) / 2
    assert summed.tolist() == [total] * 4
    np.testing.assert_allclose(averaged, total / count)
    assert rooted.tolist() == ([total] * 4 if here == count - 1 else own.tolist())
    assert copied.tolist() == [float(count)] * 4
    assert [part[0] for part in gathered] == [rank + 1.0 for rank in range(count)]
    assert strided.tolist() == [[float(count), 0.0]] * 4


@pytest.mark.ranks(2)
def test_work_goes_on_until_the_other_side_comes(group, world):
    array = np.ones(3)
    if group.rank() == 0:
        work = group.all_reduce(array, async_op=True)
        before = (work.is_completed(), work.is_success(), work.exception())
        with pytest.raises(errors.DeadlineExceededError, match="it stays pending, and wait"):
            work.wait(0.02)
        with pytest.raises(TimeoutError):
            work.wait(timedelta(milliseconds=20))
        world.send("come", 1)
        assert before == (False, False, None)
        assert work.wait(LIMIT_S)
    else:
        world.recv(source=0)
        assert group.all_reduce(array, async_op=True).wait()
    assert array.tolist() == [2.0] * 3
    group.all_reduce(array)  # an asynchronous operation that was waited for does no harm
    assert array.tolist() == [4.0] * 3


@pytest.mark.ranks(2)
def test_several_threads_wait_for_one_work(group, world):
    array = np.ones(3)
    if group.rank() == 1:
        world.recv(source=0)
        group.all_reduce(array, async_op=True).wait()
        return
    work = group.all_reduce(array, async_op=True)
    seen, called = [], []
    work.add_done_callback(lambda ended: called.append(ended.is_success()))
    limits = (None, LIMIT_S, None, LIMIT_S)
    threads = [
        threading.Thread(target=lambda limit=limit: seen.append((work.wait(limit), array.sum())))
        for limit in limits
    ]
    for thread in threads:
        thread.start()
    future = work.get_future()
    assert future is work.get_future()
    assert not future.done()
    world.send("come", 1)
    for thread in threads:
        thread.join(LIMIT_S)
    assert seen == [(True, 6.0)] * 4
    assert future.result(LIMIT_S)[0] is array
    assert called == [True]


@pytest.mark.ranks(2)
def test_future_completes_without_anybody_waiting(group, world):
    array = np.ones(1)
    other = 1 - group.rank()
    received = group.irecv(array, other, tag=8).get_future()
    sent = group.isend(np.array([group.rank() + 5.0]), other, tag=8)
    assert received.result(LIMIT_S) == other
    sent.wait(LIMIT_S)
    assert array[0] == other + 5.0
    world.Barrier()


@pytest.mark.ranks(2)
def test_then_and_gather(group):
    arrays = [np.full(2, group.rank() + n) for n in range(5)]
    works = [group.all_reduce(array, async_op=True) for array in arrays]
    totals = [
        work.then(lambda _, array=array: int(array[0]))
        for work, array in zip(works, arrays, strict=True)
    ]
    assert gather_works("all", totals).result(LIMIT_S) == [1 + 2 * n for n in range(5)]


@pytest.mark.ranks(2, 3)
def test_rank_that_comes_late(group, world):
    late = group.size() - 1
    group.set_timeout(LIMIT_S if group.rank() == late else 0.05)
    array = np.ones(2)
    refused = []
    if group.rank() == late:
        for other in range(late):
            world.recv(source=other)
        group.all_reduce(array)
    else:
        with pytest.raises(
            errors.DeadlineExceededError,
            match=rf"all_reduce number 1 of .* within 0.05 s on rank {group.rank()}; after",
        ):
            group.all_reduce(array)
        for call in (
            lambda: group.all_reduce(np.ones(1)),
            lambda: group.barrier(),
            lambda: group.broadcast(np.ones(1), late, async_op=True),
        ):
            with pytest.raises(GroupBrokenError, match="all_reduce is past its time limit") as info:
                call()
            refused.append(info.value)
        world.send("come", late)
        group.set_timeout(LIMIT_S)
    copied = np.array([float(group.rank())])
    until_it_works(lambda: group.broadcast(copied, late))
    assert array.tolist() == [float(late + 1)] * 2  # the late operation has completed
    group.all_reduce(array)
    assert array.tolist() == [float((late + 1) ** 2)] * 2
    assert copied[0] == late
    assert all(isinstance(error, DistError) for error in refused)


@pytest.mark.ranks(2)
def test_point_to_point_goes_on_while_the_group_is_broken(group, world):
    other = 1 - group.rank()
    into = np.zeros(1)
    if group.rank() == 0:
        with pytest.raises(errors.DeadlineExceededError, match="barrier number 1"):
            group.barrier(timeout=0.05)
        with pytest.raises(GroupBrokenError):
            group.barrier()
    world.Barrier()
    group.isend(np.array([group.rank() + 1.0]), other)
    assert group.recv(into, other, timeout=LIMIT_S) == other
    assert into[0] == other + 1.0
    if group.rank() == 1:
        group.barrier(timeout=LIMIT_S)
    until_it_works(lambda: group.barrier(timeout=LIMIT_S))


@pytest.mark.ranks(2)
def test_limit_of_the_group_that_is_kept(world):
    group = ProcessGroup(world.Dup(), "limited", timeout=timedelta(seconds=LIMIT_S))
    array = np.arange(3.0)
    group.all_reduce(array)
    group.barrier()
    into = np.zeros(3)
    other = 1 - group.rank()
    sending = group.isend(array, other)
    assert group.recv(into, other) == other
    sending.wait()
    np.testing.assert_array_equal(into, 2 * np.arange(3.0))
    group.set_timeout(None)
    group.all_reduce(array)
    np.testing.assert_array_equal(array, 4 * np.arange(3.0))
    with pytest.raises(ValueError, match="cannot be negative"):
        group.set_timeout(-1)


@pytest.mark.ranks(2)
def test_limit_of_the_group_for_what_has_begun(world):
    """wait() of any Work takes no longer, unless it is told another limit."""
    group = ProcessGroup(world.Dup(), "limited", timeout=0.2)
    array, note = np.ones(3), np.zeros(1)
    if group.rank() == 0:
        with group.coalesce(async_ops=True) as together:
            group.all_reduce(np.ones(2))
            group.all_reduce(np.ones(2, np.int32))
        works = [
            group.all_reduce(array, async_op=True),
            group.irecv(np.zeros(1), 1, tag=5),
            together.work,
        ]
        works += [works[0].then(lambda value: value), gather_works("both", works[:2])]
        for work in works:
            with pytest.raises(errors.DeadlineExceededError, match=r"within 0\.2 s"):
                work.wait()
        group.set_timeout(None)
        group.send(note, 1)
        for work in works:
            assert work.wait(LIMIT_S)
        np.testing.assert_array_equal(array, 2)
    else:
        group.set_timeout(None)
        group.recv(note, 0)
        with group.coalesce(async_ops=True) as together:
            group.all_reduce(np.ones(2))
            group.all_reduce(np.ones(2, np.int32))
        work = group.all_reduce(array, async_op=True)
        group.isend(note, 0, tag=5)
        assert work.wait()
        assert together.wait()


@pytest.mark.ranks(2)
def test_groups_of_several_threads(world):
    groups = [ProcessGroup(world.Dup(), f"thread {n}") for n in range(3)]
    sums = [[] for _ in groups]

    def reduce_often(number):
        for turn in range(200):
            array = np.array([turn + number + world.rank])
            groups[number].all_reduce(array)
            sums[number].append(int(array[0]))

    threads = [threading.Thread(target=reduce_often, args=(n,)) for n in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len({group.number for group in groups}) == 3
    for number, got in enumerate(sums):
        assert got == [2 * (turn + number) + 1 for turn in range(200)]


INTERRUPTED = """
import signal
import numpy as np
import mpidist as dist
from mpidist.group import mpi_pipelines

group = dist.init_process_group()
pieces = []
combination = mpi_pipelines.ReductionPipeline._combination

def interrupted(self, op, own):
    add = combination(self, op, own)

    def combine(*arrays):
        pieces.append(len(arrays[1]))
        if len(pieces) == 2:  # between two pieces, as a signal's handler would
            raise KeyboardInterrupt
        return add(*arrays)

    return combine

if group.rank() == 1:
    mpi_pipelines.ReductionPipeline._combination = interrupted
try:
    group.scan(np.ones(1 << 19))
except KeyboardInterrupt:
    group.scan(np.ones(1 << 19))
group.recv(np.zeros(1), 1)
"""


def test_an_interrupt_between_messages_breaks_the_group(tmp_path):
    ended = run_ranks(tmp_path, 3, INTERRUPTED)
    assert ended.status != 0
    assert "GroupBrokenError" in ended.err
    assert "its scan was left halfway by an interrupt (KeyboardInterrupt)" in ended.err
