"""Transformations against TensorFlow's, where it is installed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice import Dataset

tf = pytest.importorskip("tensorflow")

small = st.integers(0, 12)
number = st.integers(1, 4)
lengths = st.lists(st.integers(0, 7), max_size=12)


def same(ours, theirs):
    ours, theirs = list(ours), list(theirs.as_numpy_iterator())
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(deadline=None, max_examples=40)
@given(lengths, number, number)
def test_interleave(counts, cycle, block):
    ours = Dataset.from_source(counts).interleave(
        lambda n: Dataset.range(int(n) * 10, int(n) * 11), cycle, block
    )
    theirs = tf.data.Dataset.from_tensor_slices(np.array(counts, np.int64)).interleave(
        lambda n: tf.data.Dataset.range(n * 10, n * 11), cycle, block
    )
    same(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(small, number, number, st.integers(1, 3), st.booleans())
def test_window(count, size, shift, stride, drop):
    both = [
        library.range(count).window(size, shift, stride, drop)
        for library in (Dataset, tf.data.Dataset)
    ]
    ours, theirs = ([[int(x) for x in window] for window in windows] for windows in both)
    assert ours == theirs
    assert len(both[0]) == both[1].cardinality() == len(ours)


@settings(deadline=None, max_examples=40)
@given(lengths, number, st.booleans())
def test_padded_batch(counts, size, drop):
    ours = Dataset.from_source([np.arange(n) for n in counts])
    theirs = tf.data.Dataset.from_tensor_slices(np.array(counts, np.int64)).map(tf.range)
    same(
        ours.padded_batch(size, drop_remainder=drop), theirs.padded_batch(size, drop_remainder=drop)
    )


@settings(deadline=None, max_examples=40)
@given(lengths, st.booleans(), st.booleans())
def test_buckets(counts, drop, to_boundary):
    counts = [min(n, 5) for n in counts] if to_boundary else counts
    ours = Dataset.from_source([np.arange(n) for n in counts]).bucket_by_sequence_length(
        len, [3, 6], [2, 3, 1], pad_to_bucket_boundary=to_boundary, drop_remainder=drop
    )
    theirs = (
        tf.data.Dataset.from_tensor_slices(np.array(counts, np.int64))
        .map(tf.range)
        .bucket_by_sequence_length(
            lambda x: tf.size(x), [3, 6], [2, 3, 1], pad_to_bucket_boundary=to_boundary,
            drop_remainder=drop,
        )
    )  # fmt: skip
    same(ours, theirs)


@settings(deadline=None, max_examples=40)
@given(small, small, st.lists(st.integers(0, 1), max_size=12), st.booleans())
def test_choices(first, second, order, stop):
    both = [
        library.choose_from_datasets(
            [library.range(first), library.range(50, 50 + second)],
            library.from_tensor_slices(np.array(order, np.int64)),
            stop_on_empty_dataset=stop,
        )
        for library in (Dataset, tf.data.Dataset)
    ]
    same(*both)


@settings(deadline=None, max_examples=40)
@given(small, number, st.booleans(), st.integers(0, 3))
def test_chains(count, size, drop, skip):
    ours, theirs = (
        library.range(count)
        .skip(skip)
        .shard(2, 1)
        .repeat(2)
        .concatenate(library.range(3))
        .batch(size, drop_remainder=drop)
        .unbatch()
        .enumerate(5)
        .map(lambda i, x: i * x)
        .filter(lambda x: x % 3 != 1)
        .take(9)
        for library in (Dataset, tf.data.Dataset)
    )
    same(ours, theirs)


@settings(deadline=None, max_examples=20)
@given(st.lists(small, min_size=2, max_size=3))
def test_zip(counts):
    ours, theirs = (
        library.zip(*(library.range(count) for count in counts)).flat_map(
            lambda *numbers, library=library: (
                library.from_tensors(numbers[0])
                if hasattr(library, "from_tensors")
                else library.from_source([numbers[0]])
            )
        )
        for library in (Dataset, tf.data.Dataset)
    )
    same(ours, theirs)
