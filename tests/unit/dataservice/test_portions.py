"""Datasets of several inputs with source indices that are dealt out to several workers."""

import numpy as np
import pytest
from _cases.dealt import Dealt, all_indices, context_of
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset
from dataservice.dataset.base import Context

LETTERS = Dataset.from_tensor_slices(list("abcdefghij"))
DIGITS = Dataset.from_tensor_slices(list("0123456789"))


def dealt(indices, sizes, workers):
    """Deal out splits of the given sizes to the workers in turn."""
    splits = [[] for _ in range(workers)]
    start = turn = 0
    while start < len(indices):
        size = sizes[turn % len(sizes)]
        splits[turn % workers].append(indices[start : start + size])
        start, turn = start + size, turn + 1
    return splits


def range_of(length):
    return np.arange(length)


def str_of(window):
    return str([int(element) for element in window])


def batches(windows):
    """Return the windows as text."""
    return windows.map(lambda window: str([str(element) for element in window]))


DATASETS = {
    "zip": Dataset.zip(Dataset.range(10), LETTERS),
    "zip of unequal ones": Dataset.zip(Dataset.range(7), LETTERS, Dataset.range(20)),
    "zip of parts": Dataset.zip(Dataset.range(10).skip(3), LETTERS.take(8).shard(2, 1)),
    "zip, a part of it": Dataset.zip(Dataset.range(10), LETTERS).skip(2).shard(3, 1).take(2),
    "zip of zips": Dataset.zip(Dataset.zip(LETTERS, LETTERS), {"n": Dataset.range(10)}),
    "zip with a prefetch": Dataset.zip(Dataset.range(10).prefetch(3), LETTERS),
    "zip with a parallel map": Dataset.zip(LETTERS, Dataset.range(10).map(abs, 3)),
    "concatenate": Dataset.range(5).concatenate(Dataset.range(5, 12)),
    "concatenate what is empty": Dataset.range(0).concatenate(Dataset.range(5)),
    "concatenate to what is empty": Dataset.range(5).concatenate(Dataset.range(0)),
    "concatenate thrice": Dataset.range(2)
    .concatenate(Dataset.range(2, 5))
    .concatenate(Dataset.range(5, 6)),
    "concatenate, a part of it": Dataset.range(5).concatenate(Dataset.range(5, 12)).skip(3).take(6),
    "concatenate parts": Dataset.range(9).shard(2, 1).concatenate(Dataset.range(9).skip(6)),
    "concatenate zips": Dataset.zip(LETTERS, LETTERS).concatenate(Dataset.zip(LETTERS, LETTERS)),
    "zip of a concatenate": Dataset.zip(
        Dataset.range(5).concatenate(Dataset.range(5)).prefetch(2), LETTERS
    ),
    "concatenate filtered": Dataset.range(9)
    .filter(lambda i: i % 2)
    .concatenate(Dataset.range(9).filter(lambda i: i % 3)),
    "concatenate flattened": Dataset.range(3)
    .flat_map(lambda i: Dataset.range(i))
    .concatenate(Dataset.range(3)),
    "enumerate": LETTERS.enumerate(5),
    "enumerate, a part of it": LETTERS.enumerate().skip(4).shard(2, 0),
    "enumerate a part": LETTERS.skip(4).shard(2, 0).enumerate(),
    "enumerate a concatenate": LETTERS.concatenate(LETTERS).enumerate(),
    "cache": Dataset.range(10).cache(),
    "cache, a part of it": LETTERS.cache().skip(2).shard(2, 1),
    "cache what is prefetched": Dataset.zip(LETTERS.prefetch(2), LETTERS.prefetch(3)).cache(),
    "cache a parallel map": Dataset.range(10).map(abs, 3).cache(),
    "cache a concatenate": LETTERS.concatenate(DIGITS.take(7).cache()).cache(),
    "windows": batches(Dataset.range(10).window(3)),
    "windows that are whole": batches(Dataset.range(10).window(3, drop_remainder=True)),
    "windows that overlap": batches(Dataset.range(10).window(4, 1)),
    "windows with gaps": batches(Dataset.range(20).shard(2, 1).window(2, 3, drop_remainder=True)),
    "windows with strides": batches(Dataset.range(10).window(3, 2, 2)),
    "windows of a parallel map": batches(Dataset.range(10).map(abs, 3).prefetch(2).window(3, 2)),
    "windows of a concatenate": batches(LETTERS.concatenate(LETTERS).window(4, 3)),
    "windows of windows": batches(batches(Dataset.range(12).window(3, 1)).cache().window(2, 1)),
    "windows, a part of them": batches(Dataset.range(20).window(3, 2).skip(2).shard(3, 1)),
    "windows that are too large": batches(Dataset.range(3).window(5, drop_remainder=True)),
    "batches": Dataset.range(10).batch(3),
    "batches that are whole": Dataset.range(10).batch(3, drop_remainder=True),
    "batches of batches": Dataset.range(20).batch(2).batch(3),
    "batches of a parallel map": Dataset.range(20).map(abs, 3).prefetch(2).batch(4),
    "batches, a part of them": Dataset.range(30).batch(2).skip(1).shard(3, 1).take(4),
    "batches with numbers": LETTERS.skip(1).batch(2).enumerate(),
    "batches of a zip": Dataset.zip(LETTERS.prefetch(2), LETTERS.prefetch(3)).batch(2),
    "batches of a concatenate": LETTERS.concatenate(LETTERS.skip(2)).batch(3),
    "batches that are kept": Dataset.range(12).batch(2).cache().map(lambda batch: batch * 2),
    "batches of what is kept": Dataset.range(12).cache().batch(5),
    "batches that are filled up": Dataset.range(9).map(range_of).padded_batch(4),
    "a mixture": Dataset.sample_from_datasets([LETTERS, DIGITS.take(7)], seed=1),
    "a mixture with weights": Dataset.sample_from_datasets(
        [LETTERS, DIGITS.take(3), DIGITS.skip(2)], [0.1, 0, 5], seed=2
    ),
    "a mixture of maps": Dataset.sample_from_datasets(
        [Dataset.range(9).map(abs, 3), LETTERS.prefetch(2)], seed=3
    ),
    "a mixture, a part of it": Dataset.sample_from_datasets([LETTERS, LETTERS], seed=4).take(6),
    "a mixture of mixtures": Dataset.sample_from_datasets(
        [Dataset.sample_from_datasets([LETTERS, LETTERS], seed=5), DIGITS.take(9)], seed=6
    ),
    "a mixture without seed": Dataset.sample_from_datasets([LETTERS, DIGITS.take(5)]),
    "batches of a mixture": Dataset.sample_from_datasets(
        [Dataset.range(9), Dataset.range(20, 24)], seed=7
    ).batch(2),
    "a shuffle of all": LETTERS.shuffle(10, seed=1),
    "a shuffle of all, batched": Dataset.range(30).shuffle(99).batch(4).map(lambda b: b * 2, 2),
    "a shuffle of all, a part of it": Dataset.range(20).shuffle(20, seed=2).skip(3).shard(2, 0),
    "a shuffle of all, enumerated": Dataset.range(9).batch(2).shuffle(9, seed=3).enumerate(),
    "a shuffle of a part": Dataset.range(20).skip(3).shard(2, 1).shuffle(9, seed=5).batch(2),
    "a shuffle of batches": Dataset.range(30).batch(4).shuffle(8, seed=3).prefetch(2),
    "a shuffle twice": Dataset.range(12).shuffle(12, 1).shuffle(12, 2).window(3).map(str_of),
    "a shuffle of a mixture": Dataset.sample_from_datasets(
        [Dataset.range(9).shuffle(9), Dataset.range(20, 24)], seed=7
    ).shuffle(13),
    "a shuffle of a concatenate": DIGITS.take(6).concatenate(LETTERS).shuffle(99, seed=1),
    "a shuffle of batches of a concatenate": LETTERS.concatenate(LETTERS).batch(4).shuffle(9),
    "a shuffle of a zip with a concatenate": Dataset.zip(
        Dataset.range(20), LETTERS.concatenate(LETTERS)
    ).shuffle(20, seed=1),
    "a shuffle of windows": Dataset.range(30).window(3).map(str_of).shuffle(99, seed=0),
    "a shuffle of windows that overlap": Dataset.range(20).window(3, 1).map(str_of).shuffle(20),
    "a shuffle of what is kept": Dataset.range(30).map(abs, 2).cache().shuffle(30, seed=1),
    "a shuffle for all passes": LETTERS.shuffle(10, reshuffle_each_iteration=False),
    "a concatenate that has ended below": Dataset.range(3)
    .concatenate(Dataset.range(10, 13))
    .prefetch(20)
    .concatenate(Dataset.range(20, 26)),
    "a repeat": Dataset.range(5).repeat(3),
    "batches of a repeat": Dataset.range(7).map(abs, 2).repeat(3).batch(4),
    "a repeat of a shuffle, in part": LETTERS.shuffle(10, seed=1).repeat(3).skip(4).take(19),
    "a repeat without an end, in part": LETTERS.repeat().enumerate().take(25),
    "a zip with a repeat": Dataset.zip(LETTERS.repeat(), Dataset.range(23)),
    "windows of a repeat": batches(LETTERS.repeat(2).window(4, 2)),
    "a concatenate of repeats": LETTERS.repeat(2).concatenate(DIGITS.repeat(3)),
    "a mixture of repeats": Dataset.sample_from_datasets([LETTERS.repeat(2), DIGITS], seed=3),
    "what is kept, repeated": Dataset.range(9).map(abs, 2).cache().repeat(3),
    "what is filtered, repeated": Dataset.range(9).filter(lambda i: i % 2).repeat(3),
    "files' numbers, repeated": Dataset.range(4).flat_map(lambda i: Dataset.range(i)).repeat(2),
    "a generator": Dataset.from_generator(range, (6,)),
}


def evaluate(node, deal, stops=()):
    """Return the elements of a pass that is resumed from its state at each of ``stops``."""
    elements = node.iterate(context_of(node, deal))
    found = []
    for stop in sorted(stops):
        while len(found) < stop:
            try:
                found.append(next(elements))
            except StopIteration:
                break
        state = elements.get_state()
        elements.close()
        deal.start, deal.first = 0, deal.marked
        elements = node.iterate(context_of(node, deal))
        elements.set_state(state)
    with elements:
        return found + list(elements)


def whole_of(name):
    """Return the elements of a pass in one process."""
    return list(DATASETS[name].node.iterate(Context((1,))))


@pytest.mark.parametrize("name", DATASETS)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(1, 4),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_workers_that_share_the_indices_make_every_element_once(name, sizes, workers, stops):
    node = DATASETS[name].node
    # Indices continue from pass to pass of a sequential repeat. Its workers find the end.
    passes = 4 if "repeated" in name and node.indexed_length() is None else 1
    splits = dealt(range(node.source_length() * passes), sizes, workers)
    found = [element for mine in splits for element in evaluate(node, Dealt(*mine), stops)]
    assert sorted(map(str, found)) == sorted(map(str, whole_of(name)))


@pytest.mark.parametrize("name", DATASETS)
@given(st.integers(1, 5))
def test_every_nth_index_is_every_nth_element(name, parts):
    node = DATASETS[name].node
    if node.indexed_length() is not None:
        whole = list(map(str, whole_of(name)))
        for part in range(parts):
            mine = evaluate(node, Dealt(all_indices(node)[part::parts]), [2])
            assert list(map(str, mine)) == whole[part::parts]


@pytest.mark.parametrize(
    ("dataset", "indexed"),
    [
        (Dataset.zip(LETTERS, LETTERS), True),
        (LETTERS.repeat(2).enumerate().take(13), True),
        (LETTERS.shuffle(10, seed=1).repeat().window(3), True),
        (LETTERS.shuffle(9), False),
        (LETTERS.concatenate(LETTERS), True),
        (LETTERS.enumerate(), True),
        (LETTERS.concatenate(LETTERS.batch(2)), True),
        (LETTERS.concatenate(LETTERS.filter(bool)), False),
        (Dataset.from_generator(range, (3,)), False),
    ],
)
def test_which_datasets_are_indexed(dataset, indexed):
    assert (dataset.node.indexed_length() is not None) == indexed
