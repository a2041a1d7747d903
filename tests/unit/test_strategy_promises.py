"""Promises to take part in making a segment of a server's memory."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpidist.errors import InvalidArgumentError
from strategy.server.growth import Creation, Growth
from strategy.server.memory import Memory, needed_bytes

NAMES = "abc"
WORKERS = (0, 2, 5)
BESIDE = 7  # lives in the server's process


def creation(name, **changes):
    """A variable of a program that creates a, b and c."""
    fields = {"shape": (3,), "dtype": "float32", "ordinal": NAMES.find(name), "strategy": 0}
    return Creation(name, **(fields | changes))


class Promises(RuleBasedStateMachine):
    """Workers promise in any order, more than once, and take it back; lists keep account."""

    def __init__(self):
        super().__init__()
        self.growth = Growth(WORKERS)
        self.pending = []
        self.tokens = iter(range(10**6))

    @rule(worker=st.sampled_from([*WORKERS, BESIDE]), name=st.sampled_from(NAMES))
    def promise(self, worker, name):
        token = next(self.tokens)
        self.pending.append((worker, name, token))
        have = {w for w, n, _ in self.pending if n == name}
        assert self.growth.missing(name) != [] or set(WORKERS) <= have | {worker}
        complete = self.growth.promise(worker, creation(name), token)
        assert complete == (set(WORKERS) <= have)
        if complete:
            self.finish()

    def finish(self):
        entering, others = self.growth.finish()
        owner = {token: worker for worker, _, token in self.pending}
        assert sorted(owner[token] for token in entering) == list(WORKERS)
        assert sorted([*entering, *others]) == sorted(owner)
        self.pending = []

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def withdraw(self, data):
        worker, name, _ = data.draw(st.sampled_from(self.pending))
        gone = [t for w, n, t in self.pending if (w, n) == (worker, name)]
        assert self.growth.withdraw(worker, creation(name)) == gone
        self.pending = [entry for entry in self.pending if entry[2] not in gone]
        assert self.growth.withdraw(worker, creation(name)) == []

    @precondition(lambda self: self.pending)
    @rule(name=st.sampled_from(NAMES))
    def forget(self, name):
        gone = [token for _, n, token in self.pending if n == name]
        assert self.growth.forget(name) == gone
        self.pending = [entry for entry in self.pending if entry[1] != name]

    @invariant()
    def who_is_missing_is_known(self):
        for name in NAMES:
            have = {w for w, n, _ in self.pending if n == name}
            assert self.growth.missing(name) == [w for w in WORKERS if w not in have]


TestPromises = Promises.TestCase
TestPromises.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (creation("a"), creation("a", shape=(4,))),
        (creation("a"), creation("a", dtype="int8")),
        (creation("a"), creation("a", ordinal=1)),
        (creation("a"), creation("b", ordinal=0)),
    ],
    ids=["shape", "dtype", "number", "name"],
)
def test_workers_of_different_programs(first, second):
    growth = Growth([0, 1])
    assert not growth.promise(0, first, "first")
    with pytest.raises(InvalidArgumentError) as info:
        growth.promise(1, second, "second")
    for part in (f"worker 1 creates {second}", f"worker 0 {first}", "in the same order"):
        assert part in info.value.message
    assert growth.missing(first.name) == [1]
    assert growth.finish() == (["first"], [])


def test_what_does_not_conflict():
    growth = Growth([0, 1])
    assert not growth.promise(0, creation("a"), 1)
    assert not growth.promise(1, creation("b"), 2)  # worker 1 has another thread
    assert not growth.promise(1, creation("b", ordinal=0, strategy=1), 3)
    assert not growth.promise(0, creation("a"), 4)  # from another thread, of a strategy alike
    assert growth.promise(1, creation("a"), 5)
    assert growth.finish() == ([1, 2], [3, 4, 5])


def test_without_others_nobody_is_missing():
    growth = Growth([])
    assert growth.missing("a") == []
    assert growth.finish() == ([], [])


@pytest.mark.parametrize("lengths", [(), (0,), (1, 64), (8, 1 << 20), (65, 65)])
def test_a_segment_of_the_needed_length_has_room(lengths):
    place = Memory.carve_private(*lengths)
    assert place.segment is None
    assert place.memory.nbytes == needed_bytes(*lengths)
    assert len(place.offsets) == len(lengths)
