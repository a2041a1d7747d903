"""window under 'distributed_epoch': its windows are numbered, and dealt out by their numbers."""

import pytest
from _cases.data_readers import MADE, counted
from _cases.dealt import all_indices, context_of
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset


def text(windows):
    return [[int(element) for element in window] for window in windows]


NUMBERS = st.integers(1, 5)


@given(st.integers(0, 30), NUMBERS, NUMBERS, NUMBERS, st.booleans(), st.integers(1, 3))
def test_parts_have_the_windows_of_the_whole(length, size, shift, stride, drop, parts):
    dataset = Dataset.range(length).map(counted).window(size, shift, stride, drop)
    expected = text(dataset)
    assert len(dataset) == len(expected) == dataset.node.source_length()
    for part in range(parts):
        MADE.clear()
        indices = all_indices(dataset.node)[part::parts]
        context = context_of(dataset.node, indices)
        assert text(dataset.node.iterate(context)) == expected[part::parts]
        assert len(set(MADE)) == len(MADE)


@pytest.mark.parametrize("calls", [None, 2])
def test_an_element_that_cannot_be_made_fails_its_windows_alone(calls, no_thread_is_left_behind):
    dataset = Dataset.range(1, 8).map(lambda i: 12 // int(i - 4), calls).window(2, 1)
    node = dataset.ignore_errors().node
    context = context_of(node, all_indices(node))
    whole = node.iterate(context_of(node, all_indices(node)))
    assert text(whole) == [[-4, -6], [-6, -12], [12, 6], [6, 4], [4]]
    with node.parent.iterate(context) as windows:
        assert text(next(windows) for _ in range(2)) == [[-4, -6], [-6, -12]]
        with pytest.raises(ZeroDivisionError):
            next(windows)
        with pytest.raises(ZeroDivisionError):
            next(windows)
        assert text(windows) == [[12, 6], [6, 4], [4]]
