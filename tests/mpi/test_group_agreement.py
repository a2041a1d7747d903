"""Under MPIDIST_DEBUG=detail, members that make different calls are told so, all of them."""

import re

import numpy as np
import pytest

import mpidist as dist
from mpidist import errors
from mpidist.config import config
from mpidist.group.agreement import Question

HERE = re.escape(__file__)


def make(debug, timeout=None):
    """The default group, made where the variable says so."""
    before = config.debug
    object.__setattr__(config, "debug", debug)
    try:
        return dist.init_process_group(timeout=timeout)
    finally:
        object.__setattr__(config, "debug", before)


@pytest.fixture(params=[None, 60.0], ids=["no limit", "limit"])
def group(world, request):
    yield make("detail", request.param)
    dist.destroy_process_group()


# What rank 1 calls, what the others call, and what the error says of rank 1 and of the others.
DIFFERENT = {
    "lengths": (
        lambda group: group.all_reduce(np.ones(4)),
        lambda group: group.all_reduce(np.ones(3)),
        r"all_reduce\(SUM, float64\[4\]\)",
        r"all_reduce\(SUM, float64\[3\]\)",
    ),
    "dtypes": (
        lambda group: group.all_reduce(np.ones(3, np.float32)),
        lambda group: group.all_reduce(np.ones(3)),
        r"all_reduce\(SUM, float32\[3\]\)",
        r"all_reduce\(SUM, float64\[3\]\)",
    ),
    "reductions": (
        lambda group: group.reduce(np.ones(3), 0, "max"),
        lambda group: group.reduce(np.ones(3), 0),
        r"reduce\(MAX, root 0, float64\[3\]\)",
        r"reduce\(SUM, root 0, float64\[3\]\)",
    ),
    "roots": (
        lambda group: group.broadcast(np.ones(3), 1),
        lambda group: group.broadcast(np.ones(3), 0),
        r"broadcast\(root 1, 24 bytes\)",
        r"broadcast\(root 0, 24 bytes\)",
    ),
    "operations": (
        lambda group: group.barrier(),
        lambda group: group.all_reduce(np.ones(3)),
        r"barrier\(\)",
        r"all_reduce\(SUM, float64\[3\]\)",
    ),
    "scans": (
        lambda group: group.scan(np.ones(3), "max"),
        lambda group: group.scan(np.ones(3)),
        r"scan\(MAX, float64\[3\]\)",
        r"scan\(SUM, float64\[3\]\)",
    ),
    "lengths of scans": (
        lambda group: group.exscan(np.ones(4)),
        lambda group: group.exscan(np.ones(3)),
        r"exscan\(SUM, float64\[4\]\)",
        r"exscan\(SUM, float64\[3\]\)",
    ),
    "objects": (
        lambda group: group.all_gather_object([None] * group.size(), "x"),
        lambda group: group.all_reduce(np.ones(3)),
        r"all_gather\(512 bytes\)",
        r"all_reduce\(SUM, float64\[3\]\)",
    ),
    "asynchronous": (
        lambda group: group.all_gather_into_tensor(
            np.ones(2 * group.size()), np.ones(2), async_op=True
        ),
        lambda group: group.all_gather_into_tensor(np.ones(group.size()), np.ones(1)),
        r"all_gather\(16 bytes\)",
        r"all_gather\(8 bytes\)",
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", DIFFERENT)
def test_different_calls_are_an_error_on_all(group, case):
    one, others, says_one, says_others = DIFFERENT[case]
    who = "rank 0" if group.size() == 2 else "ranks 0, 2"
    said = (
        f"the members of group 'world', in its collective number 1, call different things: {who} "
        f"{says_others} at {HERE}:\\d+; rank 1 {says_one} at {HERE}:\\d+"
    )
    with pytest.raises(ValueError, match=said):
        (one if group.rank() == 1 else others)(group)
    total = np.ones(3)
    group.all_reduce(total)  # the group is as good as before
    np.testing.assert_array_equal(total, np.full(3, group.size()))


@pytest.mark.ranks(1, 2, 3)
def test_the_same_calls_with_what_may_differ(group):
    """Lists, parts of any sizes, objects of any length, memory in any order."""
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
def test_who_does_not_come_in_time(world, group):
    """The others must not go on to the operation when it has come."""
    group.set_timeout(0.1)
    if group.rank() == 0:
        with pytest.raises(errors.DeadlineExceededError, match="all_reduce number 1 of group"):
            group.all_reduce(np.ones(3))
        with pytest.raises(errors.GroupBrokenError):
            group.all_reduce(np.ones(3))
        world.send("over", 1)
        return
    world.recv(source=0)
    with pytest.raises(errors.DeadlineExceededError):
        group.all_reduce(np.ones(3))


@pytest.mark.ranks(2)
def test_who_is_interrupted_as_calls_are_compared_makes_no_other(group, monkeypatch):
    """The others go on to the operation itself, for which the next call must not be taken."""
    group.set_timeout(0.1)  # the others', who wait for it
    run, begin = type(group)._run, type(group)._begin

    def interrupted(original):
        def then_raise(self, op):
            result = original(self, op)
            if isinstance(op, Question):
                raise KeyboardInterrupt
            return result

        return then_raise

    if group.rank() == 0:
        monkeypatch.setattr(type(group), "_run", interrupted(run))
        monkeypatch.setattr(type(group), "_begin", interrupted(begin))
        with pytest.raises(KeyboardInterrupt):
            group.all_reduce(np.ones(3))
        with pytest.raises(errors.GroupBrokenError, match="an interrupt"):
            group.all_reduce(np.ones(3))
    else:
        with pytest.raises(errors.DeadlineExceededError):
            group.all_reduce(np.ones(3))


@pytest.mark.ranks(2)
def test_the_first_member_decides_for_all(world):
    """A variable that only some ranks have makes nobody wait."""
    group = make("detail" if world.rank == 1 else "off")
    total = np.ones(2)
    group.all_reduce(total)
    dist.destroy_process_group()
    np.testing.assert_array_equal(total, [2.0, 2.0])
