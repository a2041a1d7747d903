"""How many elements mixtures say that they have: never what a pass does not keep."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import Dataset

ENDLESS, UNKNOWN = -1, -2


def made(count):
    if count == ENDLESS:
        return Dataset.range(3).repeat()
    return Dataset.range(2).filter(bool) if count == UNKNOWN else Dataset.range(count)


COUNTS = st.lists(st.sampled_from([0, 1, 3, ENDLESS, ENDLESS, UNKNOWN]), min_size=1, max_size=3)


def check(dataset):
    told = dataset.cardinality()
    if told != UNKNOWN:
        # A pass that has fewer elements than it says ends, and one that has more gives another.
        found = len(list(itertools.islice(dataset, 60 if told == ENDLESS else told + 1)))
        assert found == (60 if told == ENDLESS else told)


@settings(deadline=None)
@given(COUNTS, st.integers(0, 5), st.sampled_from([1, 2, None]), st.booleans())
def test_chosen(counts, length, times, stop):
    choices = Dataset.range(length).map(lambda x: x % len(counts)).repeat(times)
    if times is None:
        choices = Dataset.range(len(counts)).repeat()
    check(Dataset.choose_from_datasets([made(count) for count in counts], choices, stop))


@settings(deadline=None)
@given(COUNTS, st.booleans(), st.data())
def test_drawn(counts, stop, data):
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 1.0]), min_size=len(counts), max_size=len(counts)).filter(
            any
        )
    )
    datasets = [made(count) for count in counts]
    check(Dataset.sample_from_datasets(datasets, weights, 1, stop))


@pytest.mark.parametrize(
    ("counts", "choices", "expected"),
    [
        ([ENDLESS, ENDLESS], Dataset.range(2), 2),
        ([ENDLESS, ENDLESS], Dataset.range(2).repeat(), ENDLESS),
        ([ENDLESS, ENDLESS], Dataset.range(2).filter(bool), UNKNOWN),
        ([ENDLESS, 3], Dataset.range(2), UNKNOWN),
        ([ENDLESS, 3], Dataset.range(2).repeat(), UNKNOWN),
        ([ENDLESS, 3], Dataset.range(0), 0),
        ([0, 0], Dataset.range(2).repeat(), 0),
    ],
)
def test_choices(counts, choices, expected):
    for stop in (False, True):
        dataset = Dataset.choose_from_datasets([made(count) for count in counts], choices, stop)
        assert dataset.cardinality() == expected


@pytest.mark.parametrize(
    ("counts", "weights", "going_on", "stopping"),
    [
        ([ENDLESS, 3], [1, 1], ENDLESS, UNKNOWN),
        ([ENDLESS, 3], [1, 0], ENDLESS, ENDLESS),
        ([ENDLESS, 3], [0, 1], 3, UNKNOWN),
        ([UNKNOWN, 3], [1, 1], UNKNOWN, UNKNOWN),
        ([ENDLESS, UNKNOWN], [1, 1], ENDLESS, UNKNOWN),
        ([2, 3], [1, 1], 5, UNKNOWN),
        ([0, 3], [1, 0], 0, 0),
    ],
)
def test_draws(counts, weights, going_on, stopping):
    for stop, expected in ((False, going_on), (True, stopping)):
        datasets = [made(count) for count in counts]
        dataset = Dataset.sample_from_datasets(datasets, weights, 1, stop)
        assert dataset.cardinality() == expected
