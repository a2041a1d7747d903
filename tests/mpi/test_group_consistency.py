"""Members of a group that call different collectives all get an error that shows both calls."""

import array
import re
import time

import numpy as np
import pytest
from _cases.jobs import run_ranks

import mpidist as dist
from mpidist import errors
from mpidist.config import config
from mpidist.group.consistency import COMPARED_AT_FIRST, PERIOD, Comparison

HERE = re.escape(__file__)
ENDING = r"(, )?(nonblocking)?\)"


def make(debug, timeout=None):
    """Make the default group under a value of MPIDIST_DEBUG."""
    before = config.debug
    object.__setattr__(config, "debug", debug)
    try:
        return dist.init_process_group(timeout=timeout)
    finally:
        object.__setattr__(config, "debug", before)


@pytest.fixture(params=[None, 60.0], ids=["no limit", "limit"])
def limit(request):
    return request.param


@pytest.fixture(params=["info", "detail"])
def group(world, limit, request):
    yield make(request.param, limit)
    dist.destroy_process_group()


# The call of rank 1, the call of the others, and both in the words of the error.
DIFFERENT = {
    "lengths": (
        lambda group: group.all_reduce(np.ones(4)),
        lambda group: group.all_reduce(np.ones(3)),
        r"all_reduce\(SUM, float64\[4\]",
        r"all_reduce\(SUM, float64\[3\]",
    ),
    "dtypes": (
        lambda group: group.all_reduce(np.ones(3, np.float32)),
        lambda group: group.all_reduce(np.ones(3)),
        r"all_reduce\(SUM, float32\[3\]",
        r"all_reduce\(SUM, float64\[3\]",
    ),
    "reductions": (
        lambda group: group.reduce(np.ones(3), 0, "max"),
        lambda group: group.reduce(np.ones(3), 0),
        r"reduce\(MAX, root 0, float64\[3\]",
        r"reduce\(SUM, root 0, float64\[3\]",
    ),
    "average and sum": (
        lambda group: group.all_reduce(np.ones(3), "avg"),
        lambda group: group.all_reduce(np.ones(3)),
        r"all_reduce\(AVG, float64\[3\]",
        r"all_reduce\(SUM, float64\[3\]",
    ),
    "sums with and without a factor": (
        lambda group: group.reduce(np.ones(3), 0, dist.ReduceOp.PREMUL_SUM(1.0)),
        lambda group: group.reduce(np.ones(3), 0),
        r"reduce\(PREMUL_SUM, root 0, float64\[3\]",
        r"reduce\(SUM, root 0, float64\[3\]",
    ),
    "roots": (
        lambda group: group.broadcast(np.ones(3), 1),
        lambda group: group.broadcast(np.ones(3), 0),
        r"broadcast\(root 1, 24 bytes",
        r"broadcast\(root 0, 24 bytes",
    ),
    "operations": (
        lambda group: group.barrier(),
        lambda group: group.all_reduce(np.ones(3)),
        r"barrier\(",
        r"all_reduce\(SUM, float64\[3\]",
    ),
    "scans": (
        lambda group: group.scan(np.ones(3), "max"),
        lambda group: group.scan(np.ones(3)),
        r"scan\(MAX, float64\[3\]",
        r"scan\(SUM, float64\[3\]",
    ),
    "lengths of scans": (
        lambda group: group.exscan(np.ones(4)),
        lambda group: group.exscan(np.ones(3)),
        r"exscan\(SUM, float64\[4\]",
        r"exscan\(SUM, float64\[3\]",
    ),
    "shapes": (
        lambda group: group.all_reduce(np.ones((2, 3))),
        lambda group: group.all_reduce(np.ones((3, 2))),
        r"all_reduce\(SUM, float64\[2, 3\]",
        r"all_reduce\(SUM, float64\[3, 2\]",
    ),
    "large parts": (
        lambda group: group.gather(np.ones(20_000), None, 0),
        lambda group: (
            group.gather(np.ones(10_000), [np.ones(10_000) for _ in range(group.size())], 0)
            if group.rank() == 0
            else group.gather(np.ones(10_000), None, 0)
        ),
        r"gather\(root 0, 160000 bytes",
        r"gather\(root 0, 80000 bytes",
    ),
    "blocking and not": (
        lambda group: group.all_reduce(np.ones(3), async_op=True),
        lambda group: group.all_reduce(np.ones(3)),
        r"all_reduce\(SUM, float64\[3\]",
        r"all_reduce\(SUM, float64\[3\]",
    ),
    "objects": (
        lambda group: group.all_gather_object([None] * group.size(), "x"),
        lambda group: group.all_reduce(np.ones(3)),
        r"all_gather\(512 bytes",
        r"all_reduce\(SUM, float64\[3\]",
    ),
    "asynchronous": (
        lambda group: group.all_gather_into_tensor(
            np.ones(2 * group.size()), np.ones(2), async_op=True
        ),
        lambda group: group.all_gather_into_tensor(
            np.ones(group.size()), np.ones(1), async_op=True
        ),
        r"all_gather\(16 bytes",
        r"all_gather\(8 bytes",
    ),
}


def finish(work):
    """Wait for an asynchronous operation, whose error may come after the call."""
    if work is not None:
        work.wait(30)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("before", [0, COMPARED_AT_FIRST - 1])
@pytest.mark.parametrize("case", DIFFERENT)
def test_different_calls_are_an_error_on_all(group, limit, case, before):
    one, others, says_one, says_others = DIFFERENT[case]
    if case == "blocking and not" and limit is not None:
        pytest.skip("with a time limit both are nonblocking calls of MPI")
    call_barriers(group, before)
    said = (
        f"the members of group 'world' call different collectives as collective number "
        f"{before + 1}: rank 0 "
        f"calls {says_others}{ENDING} at {HERE}:\\d+; rank 1 calls {says_one}{ENDING} at "
        f"{HERE}:\\d+"
    )
    with pytest.raises(ValueError, match=said):
        finish((one if group.rank() == 1 else others)(group))
    with pytest.raises(errors.GroupBrokenError, match=r"differed .*; make a new group"):
        group.barrier()


def call_barriers(group, count):
    for _ in range(count):
        group.barrier()


# Differences that MPI does not notice.
UNNOTICED = {
    "reductions": (
        lambda group: group.all_reduce(np.ones(3), "max"),
        lambda group: group.all_reduce(np.ones(3)),
    ),
    "shapes": (
        lambda group: group.all_reduce(np.ones((2, 3))),
        lambda group: group.all_reduce(np.ones((3, 2))),
    ),
    "dtypes": (
        lambda group: group.all_reduce(np.ones(3, np.int64)),
        lambda group: group.all_reduce(np.ones(3)),
    ),
    "order": (
        lambda group: (group.all_reduce(np.ones(3)), group.all_reduce(np.ones(3), "max")),
        lambda group: (group.all_reduce(np.ones(3), "max"), group.all_reduce(np.ones(3))),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [150, 1000, 5000])
@pytest.mark.parametrize("case", UNNOTICED)
def test_a_later_difference_is_found_within_a_period(world, limit, case, number):
    one, others = UNNOTICED[case]
    group = make("info", limit)
    try:
        call_barriers(group, number - 1)
        (one if group.rank() == 1 else others)(group)
        with pytest.raises(
            ValueError, match=f"different collectives as collective number {number}: "
        ) as told:
            call_barriers(group, PERIOD)
        text = str(told.value)
        assert text.count("all_reduce(") == 2
        assert f"results since number {number} are wrong" in text
        assert "MPIDIST_DEBUG=detail" in text
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_a_call_more_on_one_rank_is_found_while_calls_are_compared(world):
    group = make("info")
    try:
        group.barrier()
        if group.rank() == 1:
            with pytest.raises(ValueError, match=r"rank 1 calls all_reduce\(SUM, float64\[2\]\)"):
                group.all_reduce(np.ones(2))
        else:
            with pytest.raises(ValueError, match=r"rank 1 calls all_reduce\(SUM, float64\[2\]\)"):
                group.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("debug", ["info", "off"])
def test_asynchronous_operations_do_not_wait_for_other_ranks(world, debug):
    """A rank may start a collective that another one starts only after a message."""
    group, array, note = make(debug), np.ones(2), np.zeros(1)
    try:
        if group.rank() == 0:
            work = group.all_reduce(array, async_op=True)
            group.send(note, 1)
        else:
            group.recv(note, 0)
            work = group.all_reduce(array, async_op=True)
        assert work.wait(30)
        assert work.result()[0] is array
        np.testing.assert_array_equal(array, 2)
    finally:
        dist.destroy_process_group()


def reduce_later(group, op):
    group.all_reduce(np.ones(2), op, async_op=True).wait(30)


@pytest.mark.ranks(2)
def test_a_difference_of_asynchronous_operations(world):
    """The comparison may end after the operation has started."""
    group, note = make("info"), np.zeros(1)
    said = r"rank 0 calls all_reduce\(MAX, .*; rank 1 calls all_reduce\(SUM, "
    try:
        if group.rank() == 0:
            work = group.all_reduce(np.ones(2), "max", async_op=True)
            group.send(note, 1)
            with pytest.raises(ValueError, match=said):
                work.wait(30)
        else:
            group.recv(note, 0)
            with pytest.raises(ValueError, match=said):
                reduce_later(group, "sum")
        with pytest.raises(errors.GroupBrokenError):
            group.barrier()
    finally:
        dist.destroy_process_group()


STANDS = """
import numpy as np
import mpidist as dist
group = dist.init_process_group()
for _ in range(150):
    group.barrier()
group.broadcast(np.ones(3), 1 - group.rank())  # each rank waits for the other
"""


def test_ranks_that_wait_in_different_collectives_end_the_job(tmp_path):
    """The calls of a collective that is not compared are compared when ranks wait for long."""
    ended = run_ranks(tmp_path, 2, STANDS)
    assert ended.status == 1, ended.err
    said = (
        r"broadcast number 151 of group 'world' is "
        r"broadcast\(root (\d), 24 bytes\) on rank (\d) and "
        r"broadcast\(root (\d), 24 bytes\) on rank (\d)"
    )
    numbers = re.search(said, ended.err)
    assert numbers, ended.err
    root, rank, other_root, other = numbers.groups()
    assert (root, rank) == (other, other_root) != (other_root, other)


ONE_MORE = """
import numpy as np
import mpidist as dist
group = dist.init_process_group()
for _ in range(1000):
    group.all_reduce(np.ones(1))
if group.rank() == 0:
    group.broadcast(np.ones(1), 0)  # its root does not wait for the others
for _ in range(300):
    group.all_reduce(np.ones(1))
"""


@pytest.mark.parametrize("size", [2, 3])
def test_a_late_collective_of_one_rank_alone_ends_the_job(tmp_path, size):
    """Rank 0 compares calls before collective 1024, while the other ranks wait in number 1023."""
    ended = run_ranks(tmp_path, size, ONE_MORE, env={"MPIDIST_STALL_S": "6"})
    assert ended.status == 1, ended.err
    said = (
        r"all ranks of a group wait in different collectives: "
        r"rank 0 in all_reduce\(.*\), its number 1024; rank 1 in all_reduce\(.*\), its number 1023"
    )
    assert re.search(said, ended.err), ended.err


LATE = """
import time
import numpy as np
import mpidist as dist
group = dist.init_process_group()
for _ in range(150):
    group.barrier()
if group.rank() == 0:
    time.sleep(9)
group.broadcast(np.ones(3), 1)  # rank 1 does not wait here
group.barrier()
print("done")
"""


def test_ranks_that_wait_for_a_late_one_do_not_end_the_job(tmp_path):
    ended = run_ranks(tmp_path, 3, LATE, env={"MPIDIST_STALL_S": "6"})
    assert ended.status == 0, ended.err
    assert ended.out.count("done") == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wait", ["blocking", "second work first"])
def test_an_operation_behind_a_difference_ends_with_it(world, wait):
    """A rank must not block in a collective that the other rank refuses."""
    group, note = make("info"), np.zeros(1)
    said = r"rank 0 calls all_reduce\(MAX, .*; rank 1 calls all_reduce\(SUM, "
    try:
        if group.rank() == 0:
            first = group.all_reduce(np.ones(2), "max", async_op=True)
            group.send(note, 1)
            if wait == "blocking":
                with pytest.raises(errors.GroupBrokenError) as told:
                    group.barrier()
                assert re.search(said, str(told.value.__cause__))
            else:
                # The start refuses if rank 1 has called by then; otherwise the wait fails.
                with pytest.raises((ValueError, errors.GroupBrokenError)):
                    reduce_later(group, "sum")
            with pytest.raises(ValueError, match=said):
                first.wait(30)
        else:
            group.recv(note, 0)
            with pytest.raises(ValueError, match=said):
                reduce_later(group, "sum")
        with pytest.raises(errors.GroupBrokenError):
            group.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_numbers_of_several_types_are_the_same_call(world):
    """Roots may be NumPy integers; int64 has two type characters."""
    group = make("detail")
    first = group.rank() == 0
    try:
        group.broadcast(np.ones(2), group_src=np.int64(1) if first else True)
        total = np.asarray(memoryview(array.array("q", [1, 2]))) if first else np.array([1, 2])
        group.all_reduce(total)
        assert total.tolist() == [2, 4]
        work = group.all_reduce(total, async_op=1 if first else True)
        work.wait()
        assert total.tolist() == [4, 8]
    finally:
        dist.destroy_process_group()


WAITS = """
import asyncio
import threading
import numpy as np
import mpidist as dist
group = dist.init_process_group()

async def wait():
    await group.all_reduce(np.ones(3), async_op=True)

if group.rank() == 0:
    asyncio.run(wait())
threading.Event().wait(20)  # the watchdog does not see this, and ends the job before
"""


BEHIND = """
import threading
import numpy as np
import mpidist as dist
group = dist.init_process_group()
if group.rank() == 0:
    work = group.all_reduce(np.ones(3), async_op=True)
    group.barrier()
threading.Event().wait(20)  # the watchdog does not see this, and ends the job before
"""


def test_the_watchdog_sees_an_operation_behind_a_pending_comparison(tmp_path):
    ended = run_ranks(tmp_path, 2, BEHIND, env={"MPIDIST_STALL_ABORT_S": "3"})
    assert ended.status == 1, ended.err
    assert re.search(r"all_reduce number 1 of group 'world' has waited", ended.err)


def test_the_watchdog_sees_what_coroutines_await(tmp_path):
    ended = run_ranks(tmp_path, 2, WAITS, env={"MPIDIST_STALL_ABORT_S": "3"})
    assert ended.status == 1, ended.err
    assert re.search(r"all_reduce number 1 of group 'world' has waited", ended.err)


@pytest.mark.ranks(2)
def test_off_compares_nothing(world):
    group, array = make("off"), np.full(3, 2.0)
    group.all_reduce(array, "max" if group.rank() else "sum")
    dist.destroy_process_group()


@pytest.mark.ranks(1, 2, 3)
def test_the_same_calls_with_what_may_differ(group):
    """Ranks may differ in lists, sizes of parts, lengths of objects and memory order."""
    size, rank = group.size(), group.rank()
    array = np.arange(6.0).reshape(2, 3)
    given = array if rank % 2 else np.asfortranarray(array)
    group.all_reduce(given)
    np.testing.assert_array_equal(given, array * (1 if given is array else size))
    parts = [np.empty(n + 1) for n in range(size)]
    group.all_to_all(parts, [np.full(rank + 1, float(to)) for to in range(size)])
    assert [part.tolist() for part in parts] == [[float(rank)] * (n + 1) for n in range(size)]
    objects = [None] * size
    group.all_gather_object(objects, "x" * 1000 * rank)
    assert objects == ["x" * 1000 * n for n in range(size)]
    gathered = [np.empty(2) for _ in range(size)] if rank == 0 else None
    group.gather(np.full(2, float(rank)), gathered)
    assert gathered is None or [part[0] for part in gathered] == list(range(size))
    own = np.empty(2)
    group.scatter(own, [np.full(2, n + 0.5) for n in range(size)] if rank == 0 else None)
    np.testing.assert_array_equal(own, np.full(2, rank + 0.5))
    with group.coalesce():
        sums = [np.full(n, 1.0) for n in (3, 1, 5)]
        for one in sums:
            group.all_reduce(one)
    assert [one.tolist() for one in sums] == [[float(size)] * n for n in (3, 1, 5)]
    works = [group.all_reduce(one, async_op=True) for one in sums]
    for work in works:
        work.wait()
    assert [one[0] for one in sums] == [float(size * size)] * 3


@pytest.mark.ranks(2)
def test_a_rank_that_comes_after_the_time_limit(world, group):
    """The operation stays pending, and the group can go on after it."""
    array = np.ones(3)
    if group.rank() == 0:
        group.set_timeout(0.1)
        with pytest.raises(errors.DeadlineExceededError, match="all_reduce number 1 of group"):
            group.all_reduce(array)
        with pytest.raises(errors.GroupBrokenError, match="past its time limit and still pending"):
            group.barrier()
        world.send("over", 1)
        world.recv(source=1)
    else:
        group.set_timeout(60)
        world.recv(source=0)
        work = group.all_reduce(array, async_op=True)
        world.send("called", 0)
        work.wait()
    group.set_timeout(60)
    until = time.monotonic() + 30
    while True:
        try:
            group.barrier()
            break
        except errors.GroupBrokenError:
            assert time.monotonic() < until
    np.testing.assert_array_equal(array, 2)


@pytest.mark.ranks(2)
def test_an_interrupt_during_a_comparison_breaks_the_group(group, monkeypatch):
    """The other ranks go on to the operation, which must not match the next call."""
    group.set_timeout(0.1)
    submission = type(group._submission)
    start = submission._start

    def interrupted(self, op):
        result = start(self, op)
        if isinstance(op, Comparison):
            raise KeyboardInterrupt
        return result

    if group.rank() == 0:
        monkeypatch.setattr(submission, "_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.all_reduce(np.ones(3))
        with pytest.raises(errors.GroupBrokenError, match=r"an interrupt \(KeyboardInterrupt"):
            group.all_reduce(np.ones(3))
    else:
        with pytest.raises(errors.DeadlineExceededError):
            group.all_reduce(np.ones(3))


@pytest.mark.ranks(2)
def test_the_first_member_decides_for_all(world):
    """An environment variable that only some ranks have does no harm."""
    group = make("detail" if world.rank == 1 else "off")
    total = np.ones(2)
    group.all_reduce(total)
    dist.destroy_process_group()
    np.testing.assert_array_equal(total, [2.0, 2.0])
