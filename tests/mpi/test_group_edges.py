"""Groups at their limits: odd memory, partial failures, threads, and unwaited Work handles."""

import re
import threading

import numpy as np
import pytest
from _cases.jobs import run_ranks

from mpidist import P2POp, ProcessGroup, batch_isend_irecv, errors, irecv, isend
from mpidist.errors import DistBackendError, GroupBrokenError
from mpidist.group import mpi_backend, operation, process_group, submission


@pytest.fixture
def group(world):
    return ProcessGroup(world.Dup(), "test")


def unaligned(values):
    """Return the values in unaligned memory, which has no MPI datatype."""
    values = np.asarray(values, float)
    memory = np.zeros(values.nbytes + 1, np.uint8)[1:].view(np.float64).reshape(values.shape)
    memory[...] = values
    return memory


def aligned(values):
    return np.array(values, float)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [1, 3, 20_000])
@pytest.mark.parametrize("given", [aligned, unaligned])
@pytest.mark.parametrize("taken", [aligned, unaligned])
def test_parts_in_memory_of_any_kind(group, taken, given, count, async_op):
    rank, size = group.rank(), group.size()

    def run(call, *arrays):
        work = call(*arrays, async_op=async_op)
        if work is not None:
            work.wait()

    def part(source, target):
        return np.arange(count) + 100.0 * source + 10.0 * target

    outputs = [taken(np.zeros(count)) for _ in range(size)]
    run(group.all_to_all, outputs, [given(part(rank, other)) for other in range(size)])
    np.testing.assert_array_equal(outputs, [part(other, rank) for other in range(size)])
    run(group.all_gather, outputs, given(part(rank, 0)))
    np.testing.assert_array_equal(outputs, [part(other, 0) for other in range(size)])
    whole = taken(np.zeros(size * count))
    run(group.all_gather_into_tensor, whole, given(part(rank, 1)))
    np.testing.assert_array_equal(whole, np.ravel([part(other, 1) for other in range(size)]))
    splits = [count] * size
    source = given(np.ravel([part(rank, other) for other in range(size)]))
    work = group.all_to_all_single(whole, source, splits, splits, async_op=async_op)
    if work is not None:
        work.wait()
    np.testing.assert_array_equal(whole, np.ravel([part(other, rank) for other in range(size)]))
    gathered = [taken(np.zeros(count)) for _ in range(size)] if rank == 0 else None
    group.gather(given(part(rank, 2)), gathered)
    if gathered is not None:
        np.testing.assert_array_equal(gathered, [part(other, 2) for other in range(size)])
    own = taken(np.zeros(count))
    group.scatter(own, [given(part(0, other)) for other in range(size)] if rank == 0 else None)
    np.testing.assert_array_equal(own, part(0, rank))


@pytest.mark.ranks(2, 3)
def test_broadcasts_of_which_one_is_in_odd_memory_become_one(group):
    rank = group.rank()
    make = unaligned if rank == 0 else aligned
    first, second = make(np.zeros(4)), aligned(np.zeros(3))
    if rank == 0:
        first[...], second[...] = [1, 2, 3, 4], [5, 6, 7]
    with group.coalesce():
        group.broadcast(first, 0)
        group.broadcast(second, 0)
    np.testing.assert_array_equal(first, [1, 2, 3, 4])
    np.testing.assert_array_equal(second, [5, 6, 7])


@pytest.mark.ranks(3)
def test_what_an_error_leaves_is_not_taken_for_the_next(group, monkeypatch):
    """Fail on the root in the middle. The root drains the messages of the others, then refuses."""
    rank = group.rank()
    failing = [True]

    class Request:
        def __init__(self, request):
            self.request = request

        def Wait(self):
            from mpi4py import MPI

            self.request.Wait()
            if failing:
                failing.clear()
                raise MPI.Exception(MPI.ERR_TRUNCATE)

    class Comm:
        def __getattr__(self, name):
            return getattr(group.comm, name)

        def Irecv(self, *arguments):
            return Request(group.comm.Irecv(*arguments))

    monkeypatch.setattr(group._submission._backend._parts, "_comm", Comm())
    given = np.full(20_000, 10.0 + rank)
    outputs = [np.zeros(20_000) for _ in range(3)] if rank == 0 else None
    if rank == 0:
        with pytest.raises(DistBackendError):
            group.gather(given, outputs)
        assert [output[0] for output in outputs] == [10, 11, 12]
        with pytest.raises(GroupBrokenError, match=r"gather was left halfway by an error \("):
            group.barrier()
    else:
        group.gather(given, outputs)


@pytest.mark.ranks(2)
def test_dropped_works_do_not_pile_up_behind_one_that_waits(group):
    other = 1 - group.rank()
    late = group.irecv(np.zeros(1), other, tag=7)
    array = np.ones(4)
    for _ in range(100):
        if group.rank() == 0:
            group.isend(array, other, tag=1)
        else:
            group.recv(array, other, tag=1)
        group.barrier()
    for _ in range(50):  # equally many on both ranks; each call polls pending operations
        group.barrier()
    assert len(group._submission._pending) <= 2 + submission._POLLED
    group.isend(np.ones(1), other, tag=7).wait()
    late.wait(30)


@pytest.mark.ranks(2)
def test_a_limit_counts_while_another_thread_is_in_an_operation(group):
    array, note = np.ones(1), np.zeros(1)
    if group.rank() == 0:
        inside = threading.Thread(target=group.all_reduce, args=(array,))
        inside.start()
        while not group._submission._turn.locked():
            assert inside.is_alive()
        with pytest.raises(errors.DeadlineExceededError, match=r"within 0\.2 s .*: another thread"):
            group.barrier(timeout=0.2)
        group.send(note, 1)
        inside.join(30)
    else:
        group.recv(note, 0)
        group.all_reduce(array)
    group.barrier(timeout=30)  # the other rank has not begun, so the group is intact
    assert array[0] == 2


@pytest.mark.ranks(1, 2, 3)
def test_ragged_arrays_that_one_call_cannot_count(group, monkeypatch):
    monkeypatch.setattr(process_group, "LARGEST_COUNT", 10)
    rank, size = group.rank(), group.size()
    own = np.full((2 + 7 * rank, 3), rank, np.float32)
    gathered = group.all_gather_ragged(own)
    for other, array in enumerate(gathered):
        np.testing.assert_array_equal(array, np.full((2 + 7 * other, 3), other, np.float32))
    assert len(gathered) == size


class Interrupt(Exception):
    """An exception raised by a signal handler."""


@pytest.mark.ranks(2)
def test_an_interrupt_between_the_steps_of_an_object_breaks_the_group(world, group, monkeypatch):
    """Interrupt one rank between two steps. The other rank waits for the missing step."""
    note = "x" * 5000
    group.set_timeout(2.0)
    if group.rank() == 0:
        submit = group._submission.submit

        def interrupted(op, *arguments):
            result = submit(op, *arguments)
            if op.name == "all_gather":
                raise Interrupt
            return result

        monkeypatch.setattr(group._submission, "submit", interrupted)
        with pytest.raises(Interrupt):
            group.all_gather_object([None, None], note)
        with pytest.raises(GroupBrokenError, match="left halfway"):
            group.barrier()
    else:
        with pytest.raises(errors.DeadlineExceededError):
            group.all_gather_object([None, None], note)
    world.Barrier()


@pytest.mark.ranks(2)
def test_a_prepared_message_past_its_limit_is_under_way(world, group):
    array = np.zeros(1)
    if group.rank() == 0:
        receive = group.prepare("recv", array, 1, timeout=0.2)
        with pytest.raises(errors.DeadlineExceededError):
            receive()
        with pytest.raises(ValueError, match="still pending"):
            receive()
        world.send("late", 1)
        assert receive._op.late.wait(30)
        assert array[0] == 1
        receive._op.limit = 30.0
        receive()
        assert array[0] == 2
    else:
        world.recv(source=0)
        for value in (1.0, 2.0):
            group.send(np.full(1, value), 0)


@pytest.mark.ranks(2)
def test_a_prepared_operation_is_not_collected_twice(group):
    array = np.ones(3)
    step = group.prepare("all_reduce", array)

    def twice():
        with group.coalesce():
            step()
            step()

    with pytest.raises(ValueError, match="use the same memory"):
        twice()
    step()
    np.testing.assert_array_equal(array, 2)


@pytest.fixture
def small_calls(monkeypatch):
    """Limit MPI calls to few elements."""
    for module in (operation, mpi_backend):
        monkeypatch.setattr(module, "LARGEST_COUNT", 100)
    monkeypatch.setattr(operation, "_SEGMENT_COUNT", 64)
    monkeypatch.setattr(operation, "_COLUMN_COUNT", 17)


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("small_calls")
def test_the_pieces_of_a_message_from_anybody_are_of_one_sender(group):
    if group.rank() == 0:
        for _ in range(2):
            array = np.zeros(1000)
            sender = group.recv(array)
            np.testing.assert_array_equal(array, sender)
        with pytest.raises(ValueError, match="several senders might mix"):
            group.irecv(array)
    else:
        group.send(np.full(1000, float(group.rank())), 0)


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("async_op", [False, True])
def test_reduce_scatter_in_pieces(group, async_op):
    size, rank = group.size(), group.rank()
    for _ in range(20):
        given = np.arange(1001.0 * size) * (rank + 1)
        taken = np.zeros(1001)
        work = group.reduce_scatter_tensor(taken, given, async_op=async_op)
        if work is not None:
            np.full(5000, np.nan)  # reuses memory that was freed too early
            work.wait()
        whole = np.arange(1001.0 * size) * sum(range(1, size + 1))
        np.testing.assert_array_equal(taken, whole.reshape(size, -1)[rank])


LONGER = """
import numpy as np
import mpidist as dist
from mpidist.group import mpi_pipelines
mpi_pipelines._MIN_PIPELINE_BYTES, mpi_pipelines._MAX_SEGMENT_BYTES = 8, 1 << 10
group = dist.init_process_group()
array = np.ones(256 if group.rank() == 0 else 512)
group.reduce(array, 0)
group.barrier()
"""


def test_arrays_of_other_lengths_in_a_pipeline_are_reported(tmp_path):
    ended = run_ranks(
        tmp_path, 2, LONGER, env={"MPIDIST_STALL_ABORT_S": "2", "MPIDIST_DEBUG": "off"}
    )
    assert ended.status == 1, ended.err
    # A small array may have been sent eagerly. Then the other rank waits in the barrier.
    waits = r"(reduce number 1|barrier number 2) of group '\w+' has waited for \d+ s, the limit"
    assert re.search(waits, ended.err)


@pytest.mark.ranks(2)
def test_a_batch_of_which_one_cannot_be_begins_none(world):
    import mpidist as dist

    group = dist.init_process_group()
    try:
        other = 1 - group.rank()
        fixed = np.zeros(1)
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            batch_isend_irecv([P2POp(isend, np.ones(1), other), P2POp(irecv, fixed, other)])
        array = np.zeros(1)
        works = batch_isend_irecv(
            [P2POp(isend, np.full(1, 2.0), other), P2POp(irecv, array, other)]
        )
        for work in works:
            work.wait()
        assert array[0] == 2.0
    finally:
        dist.destroy_process_group()
