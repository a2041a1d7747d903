"""Sets of ranges against Python's sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dataservice.ranges import RangeSet

LAST = 40
number = st.integers(0, LAST)
runs = st.lists(st.tuples(number, number), max_size=8)


def flat(pairs):
    return [bound for pair in pairs for bound in pair]


def members(pairs):
    return {i for start, stop in pairs for i in range(start, stop)}


class Ranges(RuleBasedStateMachine):
    """Every question has the answer of a set that was told the same."""

    def __init__(self):
        super().__init__()
        self.ranges = RangeSet()
        self.model = set()

    @rule(start=number, stop=number)
    def add(self, start, stop):
        self.ranges.add(start, stop)
        self.model |= set(range(start, stop))

    @rule(pairs=runs)
    def update(self, pairs):
        self.ranges.update(RangeSet(flat(pairs)))
        self.model |= members(pairs)

    @invariant()
    def holds_the_same(self):
        held = [i for start, stop in self.ranges.runs() for i in range(start, stop)]
        assert held == sorted(self.model)
        assert all((i in self.ranges) == (i in self.model) for i in range(-5, LAST + 2))
        assert bool(self.ranges) == bool(self.model)

    @invariant()
    def keeps_as_few_runs_as_can_be(self):
        bounds = self.ranges.bounds
        assert bounds == sorted(set(bounds))

    @invariant()
    def knows_its_prefix(self):
        assert self.ranges.prefix == next(i for i in range(LAST + 2) if i not in self.model)


TestRanges = Ranges.TestCase


@given(runs, st.randoms(use_true_random=False))
def test_the_order_of_what_is_added_does_not_matter(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    assert RangeSet(flat(pairs)) == RangeSet(flat(shuffled))


@given(runs)
def test_its_bounds_make_it_again(pairs):
    ranges = RangeSet(flat(pairs))
    assert RangeSet(ranges.bounds) == ranges
    assert (ranges == RangeSet([*ranges.bounds, 50, 51])) is False


def test_half_a_run_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        RangeSet([1, 2, 3])


def test_it_is_told_apart_from_other_things_and_cannot_be_a_key():
    assert RangeSet([1, 2]) != [1, 2]
    with pytest.raises(TypeError, match="unhashable"):
        {RangeSet()}
    assert repr(RangeSet([3, 5, 5, 7])) == "RangeSet([3, 7])"
