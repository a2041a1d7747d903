"""Transformations at their limits: empty, smallest, largest and last inputs."""

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from dataservice.dataset import UNKNOWN_CARDINALITY, Dataset
from mpidist.errors import InvalidArgumentError

NONE = [
    Dataset.range(3).filter(lambda i: False),
    Dataset.range(3).filter(lambda i: i > 1).batch(2, drop_remainder=True),
    Dataset.range(3).flat_map(lambda i: Dataset.range(0)),
    Dataset.from_generator(lambda: iter(())),
]


@pytest.mark.parametrize("dataset", NONE)
def test_an_endless_repetition_of_nothing_ends(dataset):
    elements = iter(dataset.repeat())
    for _ in range(2):
        assert next(elements, None) is None
        state = elements.get_state()
        elements = iter(dataset.repeat())
        elements.set_state(state)
    assert list(dataset.repeat().prefetch(1)) == []
    assert list(Dataset.range(2).flat_map(lambda i: dataset.repeat())) == []


def counted(limit, function):
    """Wrap a function. The wrapper raises if it is called more than ``limit`` times."""
    calls = itertools.count()

    def call(*arguments):
        assert next(calls) < limit, "the repetition does not end"
        return function(*arguments)

    return call


class RunDry:
    """A source with elements in the first pass only."""

    def __init__(self, count):
        self._elements = iter(range(count))

    def __call__(self):
        yield from self._elements


class Shrinking:
    """A source of datasets of the given sizes, followed by empty datasets."""

    def __init__(self, sizes):
        self._sizes = iter(sizes)

    def __call__(self, _):
        return Dataset.range(next(self._sizes, 0))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Dataset.from_generator(counted(9, RunDry(3))), [0, 1, 2]),
        (lambda: Dataset.from_generator(counted(9, RunDry(4))).batch(2), [0, 2]),
        (lambda: Dataset.from_generator(counted(9, RunDry(3))).shuffle(1).prefetch(2), [0, 1, 2]),
        (lambda: Dataset.from_generator(counted(9, RunDry(3))).repeat(), [0, 1, 2]),
        (lambda: Dataset.range(3).filter(counted(30, first(3))), [0, 1, 2]),
        (lambda: Dataset.range(3).map(counted(30, fails_after(3))).ignore_errors(), [0, 1, 2]),
        (
            lambda: Dataset.range(1).flat_map(counted(9, Shrinking([3]))),
            [0, 1, 2],
        ),
    ],
)
def test_a_pass_without_elements_ends_a_repetition(make, expected):
    assert [int(np.ravel(element)[0]) for element in make().repeat()] == expected


def first(count):
    """Return a function that is true for its first ``count`` calls."""
    calls = itertools.count()
    return lambda *_: next(calls) < count


def fails_after(count):
    """Return an identity function that fails after its first ``count`` calls."""
    calls = itertools.count()

    def call(x):
        if next(calls) >= count:
            raise ValueError("no more")
        return x

    return call


def test_a_pass_of_nothing_but_errors_does_not_end_a_repetition():
    passes = iter([[None], [1]])
    dataset = Dataset.from_generator(lambda: next(passes)).repeat().ignore_errors()
    assert next(iter(dataset)) == 1


def test_a_repetition_goes_on_from_a_state_in_its_first_pass():
    dataset = Dataset.from_generator(lambda: iter([1])).repeat()
    before = iter(dataset)
    next(before)
    after = iter(dataset)
    after.set_state(before.get_state())
    assert [next(after), next(after)] == [1, 1]


class Archive(Mapping):
    """A mapping of names to arrays, as in a file."""

    def __init__(self, arrays):
        self._arrays = arrays

    def __getitem__(self, name):
        return self._arrays[name]

    def __iter__(self):
        return iter(self._arrays)

    def __len__(self):
        return len(self._arrays)


def test_mappings_of_arrays(tmp_path):
    arrays = {"x": np.arange(6).reshape(2, 3), "y": np.arange(2.0)}
    np.savez(tmp_path / "arrays.npz", **arrays)
    with np.load(tmp_path / "arrays.npz") as loaded:
        datasets = [Dataset.from_tensor_slices(loaded)]
    datasets.append(Dataset.from_tensor_slices(Archive(arrays)))
    for dataset in datasets:
        for number, element in enumerate(dataset):
            np.testing.assert_equal(element, {name: arrays[name][number] for name in arrays})
    (element,) = Dataset.from_tensors((Archive({"inner": Archive(arrays)}), 1))
    np.testing.assert_equal(element, ({"inner": arrays}, 1))


@pytest.mark.parametrize("group", [Dataset.batch, Dataset.padded_batch])
@pytest.mark.parametrize("count", [0, 3])
def test_a_rest_that_would_be_left_out_does_not_fail(group, count):
    whole = [np.zeros(2)] * count
    dataset = Dataset.from_source([*whole, np.zeros((2, 2)), np.zeros(2)]).filter(lambda _: True)
    assert len(list(group(dataset, 3, drop_remainder=True))) == count // 3
    with pytest.raises(InvalidArgumentError, match="different dtypes or shapes"):
        list(group(dataset, 3))
    with pytest.raises(InvalidArgumentError, match="different dtypes or shapes"):
        list(group(dataset, 2, drop_remainder=True))


def test_a_shuffle_of_all():
    dataset = Dataset.range(100).filter(lambda i: i % 2 == 0)
    assert dataset.cardinality() == UNKNOWN_CARDINALITY
    found = [int(i) for i in dataset.shuffle(dataset.cardinality(), seed=1)]
    assert found == [int(i) for i in dataset.shuffle(100, seed=1)]
    assert sorted(found) == list(range(0, 100, 2))
    whole = Dataset.range(100).shuffle(UNKNOWN_CARDINALITY, seed=1)
    assert whole.node.indexed_length() is not None
    with pytest.raises(ValueError, match="a finite dataset"):
        Dataset.range(3).repeat().shuffle(UNKNOWN_CARDINALITY)


@pytest.mark.parametrize(
    "numbers",
    [(1 << 63, (1 << 63) + 1), (-(1 << 63), (1 << 63) - 1), (1 << 70, 1 << 71), (1 << 63,)],
)
def test_ranges_of_numbers_that_are_too_large(numbers):
    with pytest.raises(ValueError, match="fit into 64 bits"):
        Dataset.range(*numbers)


def test_ranges_at_the_ends_of_64_bits():
    top, bottom = (1 << 63) - 1, -(1 << 63)
    assert list(Dataset.range(top, top + 1)) == [top]
    assert list(Dataset.range(bottom, bottom + 1)) == [bottom]
    assert list(Dataset.range(top, bottom - 1, -top)) == [top, 0, -top]
    assert list(Dataset.range(0, 2 * bottom, bottom)) == [0, bottom]
    assert list(Dataset.range(1 << 70, 0)) == []
    assert len(Dataset.range(top)) == top


@pytest.mark.parametrize(
    ("dataset", "count"),
    [
        (Dataset.from_tensors(np.zeros((4, 2))).unbatch(), 4),
        (Dataset.from_tensors({"a": np.zeros(4), "b": ["x"] * 4}).unbatch(), 4),
        (Dataset.from_tensor_slices(np.zeros((3, 4))).unbatch(), 12),
        (Dataset.range(10).batch(3, drop_remainder=True).unbatch(), 9),
        (Dataset.range(10).batch(3).unbatch(), UNKNOWN_CARDINALITY),
        (Dataset.range(6).map(lambda i: [i, i]).unbatch(), UNKNOWN_CARDINALITY),
        (Dataset.from_tensors((np.zeros(4), np.zeros(3))).unbatch(), UNKNOWN_CARDINALITY),
        (Dataset.from_tensors(1).unbatch(), UNKNOWN_CARDINALITY),
        (Dataset.from_tensors(np.zeros((0, 2))).repeat().unbatch(), -1),
        (Dataset.from_tensors(np.zeros((0, 2))).unbatch(), 0),
        (Dataset.range(4).padded_batch(2, [1, 1]).unbatch(), UNKNOWN_CARDINALITY),
    ],
)
def test_how_many_rows_there_are(dataset, count):
    assert dataset.cardinality() == count
    if count >= 0:
        assert len(list(dataset)) == count
