"""cache under 'distributed_epoch': a process makes each of its elements only once."""

from collections import Counter

import pytest
from _cases.data_readers import MADE, counted, numbers
from _cases.dealt import Dealt, context_of
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset, distribute

MODE = "distributed_epoch"


def begin(node, splits):
    return node.iterate(context_of(node, splits))


def divided(length, sizes):
    """Divide a source of the given length into splits. The sizes repeat."""
    splits = []
    while (start := splits[-1].stop if splits else 0) < length:
        splits.append(range(start, min(start + sizes[len(splits) % len(sizes)], length)))
    return splits


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.parametrize("calls", [None, 3])
@given(length=st.integers(0, 20), epochs=st.lists(SIZES, min_size=1, max_size=3))
def test_each_element_is_made_once(calls, length, epochs):
    MADE.clear()
    node = Dataset.range(length).map(counted, calls).cache().node
    for sizes in epochs:
        with begin(node, Dealt(*divided(length, sizes))) as elements:
            assert numbers(elements) == list(range(length))
    assert sorted(MADE) == list(range(length))


@given(SIZES, SIZES, st.sets(st.integers(0, 19)), st.integers(0, 20))
def test_some_are_kept_and_a_pass_is_taken_up_elsewhere(before, after, kept, stop):
    splits = divided(20, before)
    first, other = (Dataset.range(20).map(lambda i: i * 2, 2).cache().node for _ in range(2))
    for index in kept:
        list(begin(other, Dealt(range(index, index + 1))))
    elements = begin(first, Dealt(*splits))
    found = numbers(next(elements) for _ in range(stop))
    state = elements.get_state()
    elements.close()
    elements = begin(other, Dealt(*splits))
    elements.set_state(state)
    assert found + numbers(elements) == [i * 2 for i in range(20)]
    with begin(other, Dealt(*divided(20, after))) as again:
        assert numbers(again) == [i * 2 for i in range(20)]


@pytest.mark.parametrize("calls", [None, 2])
def test_an_element_that_cannot_be_made_is_tried_again(calls):
    MADE.clear()
    node = Dataset.range(6).map(fails_once_at_two, calls).cache().ignore_errors().node
    splits = divided(6, [4])
    assert numbers(begin(node, Dealt(*splits))) == [0, 1, 3, 4, 5]
    assert numbers(begin(node, Dealt(*splits))) == list(range(6))
    assert sorted(MADE) == [0, 1, 2, 2, 3, 4, 5]


def fails_once_at_two(i):
    counted(i)
    if i == 2 and MADE.count(2) == 1:
        raise ValueError("not yet")
    return i


@pytest.mark.parametrize("workers", [1, 3])
def test_epochs_of_a_service(make_service, workers):
    target = make_service(workers).target
    MADE.clear()
    dataset = Dataset.range(60).map(counted).cache().shuffle(9).apply(distribute(MODE, target))
    assert len(dataset) == 60
    for _ in range(4):
        assert sorted(numbers(dataset)) == list(range(60))
    made = Counter(MADE)
    assert set(made) == set(range(60))
    # Workers of one process each have their own copy of the dataset, and so their own cache.
    assert max(made.values()) <= workers


def test_trainers_in_a_fixed_order(make_service):
    target = make_service(2).target
    MADE.clear()
    apply = distribute(MODE, target, deterministic=True, num_shards=4)
    dataset = Dataset.range(60).map(counted).cache().apply(apply)
    for _ in range(4):
        assert numbers(dataset) == list(range(60))
    assert max(Counter(MADE).values()) <= 2
