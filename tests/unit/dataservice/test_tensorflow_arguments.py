"""Names and arguments that programs for tf.data use."""

import collections
from pathlib import Path

import numpy as np
import pytest

from dataservice import ArraySpec, Dataset, distribute
from mpidist.errors import InvalidArgumentError, NotFoundError


class Kind:
    """A dtype of TensorFlow."""

    as_numpy_dtype = np.dtype("float32")


@pytest.mark.parametrize("dtype", [np.int32, "uint8", np.float64, Kind()])
def test_dtypes_of_numbers(dtype):
    wanted = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
    counted = Dataset.counter(5, 2, dtype=dtype)
    for dataset in (counted.take(3), Dataset.range(5, 11, 2, output_type=dtype)):
        assert [(value.dtype, value) for value in dataset] == [(wanted, n) for n in (5, 7, 9)]
        assert dataset.element_spec == ArraySpec((), wanted)
    assert Dataset.range(0, output_type=dtype).element_spec == ArraySpec((), wanted)


def test_numbers_that_do_not_fit_a_dtype():
    with pytest.raises(InvalidArgumentError, match="int64"):
        list(Dataset.range(300, output_type=np.uint8))
    with pytest.raises(InvalidArgumentError, match="int64"):
        list(Dataset.counter(0, -1, dtype=np.uint8).take(2))
    for dtype in (str, bool, object, None):
        with pytest.raises(TypeError, match="dtype"):
            Dataset.range(3, output_type=dtype)
        with pytest.raises(TypeError, match="dtype"):
            Dataset.counter(dtype=dtype)


def test_a_range_of_another_dtype_is_shared_in_order(make_service):
    dataset = Dataset.range(40, output_type=np.int16).batch(4)
    there = dataset.apply(
        distribute("distributed_epoch", make_service(2).target, deterministic=True, num_shards=3)
    )
    assert np.concatenate(list(there)).tolist() == list(range(40))


def test_files_are_listed_in_their_order_or_shuffled(tmp_path, monkeypatch):
    names = [f"{letter}.txt" for letter in "dbacfe"]
    for name in [*names, "other.csv"]:
        (tmp_path / name).write_text(name)
    expected = [str(tmp_path / name) for name in sorted(names)]
    pattern = tmp_path / "*.txt"
    assert list(Dataset.list_files(pattern, shuffle=False)) == expected
    several = Dataset.list_files([tmp_path / "other.csv", str(pattern)], shuffle=False)
    assert list(several) == [str(tmp_path / "other.csv"), *expected]
    monkeypatch.chdir(tmp_path)
    assert list(Dataset.list_files("*.txt", shuffle=False)) == expected

    dataset, again = (Dataset.list_files(pattern, seed=5) for _ in range(2))
    epochs = [list(dataset) for _ in range(4)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    assert epochs == [list(again) for _ in range(4)]
    assert sorted(Dataset.list_files(pattern, None)) == expected

    contents = dataset.map(lambda path: Path(path).read_text())
    assert sorted(contents) == sorted(names)


def test_files_that_are_not_there(tmp_path):
    for wrong in (tmp_path / "*.txt", [], tmp_path / "a.txt"):
        with pytest.raises(NotFoundError, match="list_files"):
            Dataset.list_files(wrong)
    with pytest.raises(TypeError, match="list_files needs a path as file_pattern"):
        Dataset.list_files(3)
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match="negative"):
        Dataset.list_files(tmp_path / "a.txt", seed=-1)


def lengths():
    sizes = [1, 4, 2, 4, 1, 2, 4]
    return Dataset.from_source([np.full(n, n) for n in sizes])


def test_buckets_without_padding():
    def bucket(boundaries, sizes, **others):
        return lengths().bucket_by_sequence_length(
            len, boundaries, sizes, no_padding=True, **others
        )

    batches = bucket([2, 3], [2, 2, 2])
    shapes = [batch.shape for batch in batches]
    assert shapes == [(2, 4), (2, 1), (2, 2), (1, 4)]
    assert batches.element_spec == ArraySpec((None, None), np.int64)
    # As in TensorFlow, nothing is padded, to boundaries either.
    to_boundary = bucket([2, 3], [2, 2, 2], pad_to_bucket_boundary=True, padding_values=9)
    assert [batch.shape for batch in to_boundary] == shapes
    assert [batch.shape for batch in bucket([2, 3], [2, 2, 2], drop_remainder=True)] == shapes[:3]
    with pytest.raises(InvalidArgumentError, match="cannot batch"):
        list(bucket([3], [2, 2]))


def sampled(**arguments):
    datasets = [Dataset.range(20), Dataset.range(100, 120)]
    return Dataset.sample_from_datasets(datasets, **arguments)


@pytest.mark.parametrize("seed", [None, 4])
def test_samples_that_are_drawn_alike(seed):
    alike = sampled(seed=seed, rerandomize_each_iteration=False)
    epochs = [list(alike) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert list(alike.repeat(2)) == epochs[0] * 2
    if seed is not None:
        assert list(sampled(seed=seed, rerandomize_each_iteration=False)) == epochs[0]
    for anew in (None, True):
        dataset = sampled(seed=seed, rerandomize_each_iteration=anew)
        assert len({tuple(dataset) for _ in range(3)}) == 3


def test_samples_that_workers_draw_alike(make_service):
    dataset = sampled(rerandomize_each_iteration=False)
    expected = list(dataset)
    there = dataset.apply(
        distribute("distributed_epoch", make_service(2).target, deterministic=True, num_shards=3)
    )
    assert [list(there) for _ in range(2)] == [expected] * 2


def test_a_state_of_samples_drawn_alike():
    dataset = sampled(rerandomize_each_iteration=False)
    elements = iter(dataset)
    before = [next(elements) for _ in range(7)]
    later = iter(dataset)
    later.set_state(elements.get_state())
    assert before + list(later) == list(dataset)


def test_the_spec_of_a_snapshot(tmp_path):
    Dataset.range(3).save(tmp_path / "s")
    spec = ArraySpec((), np.int64)
    assert list(Dataset.load(tmp_path / "s", element_spec=spec)) == [0, 1, 2]
    other = Dataset.load(tmp_path / "s", element_spec=ArraySpec((2,), np.int64))
    with iter(other) as elements, pytest.raises(InvalidArgumentError, match="but its element_spec"):
        next(elements)


def test_names_have_no_effect():
    dataset = Dataset.range(6, name="r").map(lambda i: i // 2, name="m").batch(2, name="b")
    assert dataset.element_spec == Dataset.range(6).map(lambda i: i // 2).batch(2).element_spec
    count = collections.Counter(dataset.unbatch(name="u").as_numpy_iterator())
    assert count == {0: 2, 1: 2, 2: 2}
