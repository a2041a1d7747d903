from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.dataset.base import ENDLESS
from dataservice.dispatch.records import Granted
from dataservice.dispatch.scheduler import next_split
from dataservice.proto import dataservice_pb2 as pb


@given(st.integers(1, 3000), st.integers(1, 5), st.integers(1, 4))
def test_every_index_of_every_pass_once(period, workers, passes):
    given_out, start = Counter(), 0
    while start < period * passes:
        split = next_split(start, period, workers)
        assert split.start == start
        assert split.start // period == (split.stop - 1) // period  # no split is of two passes
        given_out.update(split)
        start = split.stop
    assert given_out == Counter(range(period * passes))


@given(st.integers(1, 20_000), st.integers(1, 8))
def test_splits_shrink_to_one(length, workers):
    start, sizes = 0, []
    while start < length:
        split = next_split(start, length, workers)
        start = split.stop
        sizes.append(len(split))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert max(sizes) <= max(length / workers / 4, 1)


def test_of_nothing_there_is_no_split():
    assert next_split(0, 0, 1) == range(0)


@pytest.mark.parametrize("workers", [1, 100])
def test_splits_of_an_endless_source_are_small(workers):
    assert next_split(10**9, ENDLESS, workers) == range(10**9, 10**9 + 256)


SPLITS = st.lists(
    st.builds(
        lambda start, size: range(start, start + size), st.integers(0, 50), st.integers(1, 4)
    ),
    max_size=20,
)


def granted_of(splits):
    granted = Granted()
    for split in splits:
        granted = granted.plus(split)
    return granted


@given(SPLITS)
def test_a_position_stands_for_the_same_index_for_good(splits):
    granted, indices = granted_of(splits), [index for split in splits for index in split]
    assert granted.stop == len(indices)
    for position, index in enumerate(indices):
        assert granted.at(position)[0] == index
    assert granted.at(len(indices)) is None
    assert granted.at(-1) is None


@given(SPLITS, st.integers(0, 90))
def test_what_comes_before_a_checkpoint_is_forgotten_and_keeps_its_positions(splits, position):
    granted = granted_of(splits)
    position = min(position, granted.stop)
    after = granted.after(position)
    assert after.stop == granted.stop
    for each in range(granted.stop):
        expected = None if each < position else granted.at(each)
        assert after.at(each) == expected
    assert after.after(position) == after
    assert Granted.of(pb.Splits.FromString(after.state().SerializeToString())) == after


def test_a_grant_goes_on_counting_after_its_beginning_was_forgotten():
    granted = granted_of([range(3), range(3, 6)]).after(6).plus(range(6, 9))
    assert [granted.at(position) for position in (5, 6)] == [None, range(6, 9)]
    assert next(place for place in count(6) if granted.at(place) is None) == 9
