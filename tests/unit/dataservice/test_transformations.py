"""Transformations against NumPy and plain Python."""

import itertools
import json
import os
import pickle

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice import Dataset
from dataservice.dataset.spec import ArraySpec
from mpidist.errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    UnimplementedError,
)

small = st.integers(0, 20)


def values(dataset):
    return [int(element) for element in dataset]


def rows(lengths):
    """Return a dataset of arrays of the given lengths. Element i is i, i + 1, ..."""
    return Dataset.from_source([np.arange(i, i + n) for i, n in enumerate(lengths)])


@given(small, st.integers(1, 5))
def test_filter(count, divisor):
    dataset = Dataset.range(count).filter(lambda i: i % divisor == 0)
    assert values(dataset) == list(range(0, count, divisor))
    assert dataset.cardinality() == (-2 if count else 0)


def test_functions_get_the_members_of_a_tuple():
    pairs = Dataset.zip(Dataset.range(5), Dataset.range(5, 10))
    assert list(pairs.filter(lambda a, b: a + b > 8)) == [(2, 7), (3, 8), (4, 9)]


@pytest.mark.parametrize("name", ["map", "filter"])
def test_a_function_that_raises_stop_iteration(name):
    def function(i):
        raise StopIteration

    with pytest.raises(RuntimeError, match=f"given to {name} raised StopIteration"):
        list(getattr(Dataset.range(3), name)(function))


def test_enumerate_and_its_spec():
    dataset = Dataset.range(10, 13).enumerate(start=5)
    assert list(dataset) == [(5, 10), (6, 11), (7, 12)]
    assert len(dataset) == 3
    assert dataset.element_spec == (ArraySpec((), np.int64),) * 2


@given(small, small)
def test_concatenate(first, second):
    dataset = Dataset.range(first).concatenate(Dataset.range(100, 100 + second))
    assert values(dataset) == [*range(first), *range(100, 100 + second)]
    assert len(dataset) == first + second


def test_concatenate_with_what_never_ends():
    dataset = Dataset.range(3).repeat().concatenate(Dataset.range(9))
    assert dataset.cardinality() == -1


@given(st.lists(small, min_size=1, max_size=4))
def test_zip(counts):
    dataset = Dataset.zip(*(Dataset.range(count) for count in counts))
    if len(counts) == 1:
        assert values(dataset) == list(range(counts[0]))
    else:
        assert list(dataset) == list(zip(*map(range, counts), strict=False))
    assert len(dataset) == min(counts)


def test_zip_of_a_structure():
    dataset = Dataset.zip({"a": Dataset.range(2), "b": (Dataset.range(5, 9),)})
    assert list(dataset) == [{"a": 0, "b": (5,)}, {"a": 1, "b": (6,)}]
    assert dataset.element_spec["b"] == (ArraySpec((), np.int64),)
    assert Dataset.zip(Dataset.range(3).repeat(), Dataset.range(4)).cardinality() == 4


def test_zip_stays_ended():
    elements = iter(Dataset.zip(Dataset.range(9), Dataset.range(1)))
    assert next(elements) == (0, 0)
    for _ in range(3):
        assert next(elements, "over") == "over"


@pytest.mark.parametrize("arguments", [(), (3,), (Dataset.range(2), "b")])
def test_what_is_no_dataset(arguments):
    with pytest.raises((TypeError, ValueError), match="dataset"):
        Dataset.zip(*arguments)


@given(st.lists(st.integers(0, 6), max_size=6), st.integers(1, 4), st.integers(1, 3))
def test_interleave(counts, cycle, block):
    """Check interleave against a queue of datasets. Each gives ``block`` elements in its turn."""
    dataset = Dataset.from_source(counts).interleave(
        lambda n: Dataset.range(int(n) * 100, int(n) * 101), cycle, block
    )
    found = values(dataset)
    assert sorted(found) == sorted(x for n in counts for x in range(n * 100, n * 101))


@given(st.lists(st.integers(0, 6), max_size=6))
def test_flat_map(counts):
    dataset = Dataset.from_source(counts).flat_map(lambda n: Dataset.range(n))
    assert values(dataset) == [x for n in counts for x in range(n)]


def test_flat_map_needs_datasets():
    with pytest.raises(TypeError, match="given to flat_map returned int64, not a Dataset"):
        list(Dataset.range(2).flat_map(lambda i: i))
    for arguments in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            Dataset.range(2).interleave(Dataset.range, *arguments)


@given(st.integers(1, 4), st.integers(0, 4))
def test_unbatch_undoes_batch(size, count):
    dataset = Dataset.range(count).map(lambda i: {"a": i, "b": np.full(3, i)})
    found = list(dataset.batch(size).unbatch())
    assert [int(element["a"]) for element in found] == list(range(count))
    assert all((element["b"] == element["a"]).all() for element in found)


@pytest.mark.parametrize("element", [np.int64(3), (np.zeros(2), np.zeros(3))])
def test_unbatch_of_what_has_no_rows(element):
    with pytest.raises(InvalidArgumentError, match="unbatch needs"):
        list(Dataset.from_source([element]).unbatch())


# Batches of different lengths


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.integers(1, 4), st.booleans())
def test_padded_batch(lengths, size, drop):
    found = list(rows(lengths).padded_batch(size, padding_values=-1, drop_remainder=drop))
    starts = range(0, len(lengths) - len(lengths) % size if drop else len(lengths), size)
    assert len(found) == len(starts)
    for batch, start in zip(found, starts, strict=True):
        chosen = lengths[start : start + size]
        assert batch.shape == (len(chosen), max(chosen))
        for number, (row, length) in enumerate(zip(batch, chosen, strict=True), start):
            np.testing.assert_array_equal(row[:length], np.arange(number, number + length))
            assert (row[length:] == -1).all()


def test_padded_batch_of_a_structure():
    elements = [{"a": np.ones(n), "b": (np.str_("x" * n), np.zeros((n, 2)))} for n in (1, 3)]
    (batch,) = Dataset.from_source(elements).padded_batch(
        2, padded_shapes={"a": (4,), "b": ((), (None, 3))}, padding_values={"a": 7, "b": ("", 5)}
    )
    assert batch["a"].tolist() == [[1, 7, 7, 7], [1, 1, 1, 7]]
    assert batch["b"][0].tolist() == ["x", "xxx"]
    assert batch["b"][1].shape == (2, 3, 3)
    assert batch["b"][1][1].tolist() == [[0, 0, 5]] * 3


@pytest.mark.parametrize(
    ("shapes", "elements", "message"),
    [
        ((2,), [np.zeros(3)], "longer than"),
        ((2, 2), [np.zeros(3)], "has 2 dimensions"),
        (((2,), (2,)), [np.zeros(1)], "one for all"),
        (None, [np.zeros(1), np.zeros((1, 1))], "different dtypes or shapes in component 0"),
        (None, [np.zeros(1), np.zeros(1, int)], "different dtypes or shapes in component 0"),
        (None, [np.zeros(1), {"a": np.zeros(1)}], "different structure"),
    ],
)
def test_what_cannot_be_padded(shapes, elements, message):
    with pytest.raises(InvalidArgumentError, match=message):
        list(Dataset.from_source(elements).padded_batch(2, shapes))


@given(st.lists(st.integers(0, 9), max_size=30))
def test_buckets(lengths):
    dataset = rows(lengths).bucket_by_sequence_length(len, [3, 6], [2, 3, 4])
    found = list(dataset)
    numbers = []
    for batch in found:
        actual = [int((row != 0).sum()) + int(0 in row[:1]) for row in batch]
        del actual
        numbers.append(batch.shape[1])
    kinds = [0 if width < 3 else 1 if width < 6 else 2 for width in numbers]
    by_bucket = [[n for n in lengths if low <= n < high] for low, high in ((0, 3), (3, 6), (6, 10))]
    for kind, size in enumerate((2, 3, 4)):
        batches = [batch for batch, k in zip(found, kinds, strict=True) if k == kind]
        chosen = by_bucket[kind]
        assert [len(batch) for batch in batches] == [
            len(chosen[start : start + size]) for start in range(0, len(chosen), size)
        ]


def test_buckets_filled_up_to_their_boundary():
    dataset = rows([1, 3, 2]).bucket_by_sequence_length(
        len, [4], [3, 1], pad_to_bucket_boundary=True
    )
    assert [batch.shape for batch in dataset] == [(3, 3)]
    with pytest.raises(InvalidArgumentError, match="as long as the last of the boundaries"):
        list(rows([4]).bucket_by_sequence_length(len, [4], [1, 1], pad_to_bucket_boundary=True))
    dropped = rows([1, 1, 5]).bucket_by_sequence_length(len, [4], [2, 2], drop_remainder=True)
    assert [batch.shape for batch in dropped] == [(2, 1)]


@pytest.mark.parametrize(("boundaries", "sizes"), [([3], [1]), ([3, 3], [1, 1, 1]), ([1], [0, 1])])
def test_wrong_buckets(boundaries, sizes):
    with pytest.raises(ValueError, match="bucket_"):
        rows([1]).bucket_by_sequence_length(len, boundaries, sizes)


@given(small, st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_window(count, size, shift, stride, drop):
    dataset = Dataset.range(count).window(size, shift, stride, drop)
    found = [values(window) for window in dataset]
    expected = [list(range(start, count, stride))[:size] for start in range(0, count, shift)]
    expected = [window for window in expected if not drop or len(window) == size]
    assert found == expected
    assert len(dataset) == len(expected)


def test_windows_of_a_structure():
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4, 8))
    found = [(values(a), values(b)) for a, b in pairs.window(2)]
    assert found == [([0, 1], [4, 5]), ([2, 3], [6, 7])]
    batches = pairs.window(2).flat_map(lambda a, b: Dataset.zip(a.batch(2), b.batch(2)))
    assert [tuple(map(list, pair)) for pair in batches] == [([0, 1], [4, 5]), ([2, 3], [6, 7])]


# Several datasets


@given(st.lists(small, min_size=1, max_size=4), st.integers(0, 9))
def test_samples_have_all_elements_in_order(counts, seed):
    datasets = [Dataset.range(n * 100, n * 100 + count) for n, count in enumerate(counts)]
    dataset = Dataset.sample_from_datasets(datasets, seed=seed)
    found = values(dataset)
    assert len(dataset) == len(found) == sum(counts)
    for number, own in enumerate(datasets):
        assert [x for x in found if x // 100 == number] == values(own)


def test_samples_follow_their_weights_and_their_seed():
    ones, twos = (Dataset.from_source([n]).repeat() for n in (1, 2))
    mixed = Dataset.sample_from_datasets([ones, twos], [1, 3], seed=0)
    first = values(mixed.take(4000))
    assert 900 < first.count(1) < 1100
    again = Dataset.sample_from_datasets([ones, twos], [1, 3], seed=0).take(4000)
    assert values(again) == first
    assert set(values(Dataset.sample_from_datasets([ones, twos], [0, 2]).take(99))) == {2}
    short = Dataset.sample_from_datasets(
        [Dataset.range(3), ones], seed=1, stop_on_empty_dataset=True
    )
    assert sorted(set(values(short))) == [0, 1, 2]


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")], [1, float("inf")]])
def test_wrong_weights(weights):
    with pytest.raises(ValueError, match="weights must be"):
        Dataset.sample_from_datasets([Dataset.range(2)] * 2, weights)


def test_choices():
    datasets = [Dataset.range(n * 10, n * 10 + 2) for n in range(3)]
    order = Dataset.from_source([2, 0, 2, 1, 2, 0])
    chosen = Dataset.choose_from_datasets(datasets, order)
    assert values(chosen) == [20, 0, 21, 10]
    rest = Dataset.choose_from_datasets(datasets, order, stop_on_empty_dataset=False)
    assert values(rest) == [20, 0, 21, 10, 1]
    with pytest.raises(InvalidArgumentError, match="choice 3 is not in"):
        list(Dataset.choose_from_datasets(datasets, Dataset.range(3, 4)))


# Caches


@pytest.mark.parametrize("where", ["memory", "file"])
def test_cache(tmp_path, where):
    made = []

    def make(i):
        made.append(int(i))
        return {"i": i, "text": f"{i}"}

    path = str(tmp_path / "below" / "cache") if where == "file" else ""
    dataset = Dataset.range(4).map(make).cache(path)
    part = iter(dataset)
    next(part)
    part.close()  # an incomplete pass leaves nothing in the file
    for _ in range(3):
        assert [(int(e["i"]), str(e["text"])) for e in dataset] == [(n, str(n)) for n in range(4)]
    once = [0, 1, 2, 3] if where == "memory" else [0, 0, 1, 2, 3]
    assert made == once
    assert len(dataset) == 4
    if where == "file":
        assert os.listdir(tmp_path / "below") == ["cache"]
        again = pickle.loads(cloudpickle.dumps(dataset))
        assert len(list(again)) == 4
        assert made == once


def test_a_cache_of_something_else(tmp_path):
    path = tmp_path / "cache"
    list(Dataset.range(3).cache(str(path)))
    with pytest.raises(InvalidArgumentError, match=r"for range\(0, 3, 1\), not for range\(0, 4"):
        list(Dataset.range(4).cache(str(path)))
    content = path.read_bytes()
    for damaged in (b"", content[:-3], b"x" * len(content)):
        path.write_bytes(damaged)
        with pytest.raises(DataLossError, match="or is damaged"):
            list(Dataset.range(3).cache(str(path)))


# Sources


def test_generators_are_called_for_each_pass():
    calls = []

    def count(start, stop):
        calls.append(1)
        yield from range(start, stop)

    dataset = Dataset.from_generator(count, (2, 5))
    assert values(dataset) == values(dataset) == [2, 3, 4]
    assert len(calls) == 2
    assert dataset.cardinality() == -2
    with pytest.raises(TypeError, match="function"):
        Dataset.from_generator([1, 2])


class Tensor:
    """An array of another library."""

    def __array__(self, dtype=None, copy=None):
        return np.arange(3, dtype=dtype)


def test_sources():
    assert values(Dataset.from_source([3, 1, 2])) == [3, 1, 2]
    assert len(Dataset.from_source(range(7))) == 7
    assert values(Dataset.from_source({5: 0, 6: 0}.keys())) == [5, 6]
    (element,) = Dataset.from_source([{"a": Tensor(), "b": (1, [2, 3])}])
    assert element["a"].tolist() == [0, 1, 2]
    assert element["b"][1].tolist() == [2, 3]
    with pytest.raises(TypeError, match="int has neither"):
        Dataset.from_source(3)


def test_sources_can_be_shared_by_index_only():
    assert Dataset.from_source([1, 2]).node.source_length() == 2
    for dataset in (
        Dataset.zip(Dataset.range(3), Dataset.range(3).shuffle(2)),
        Dataset.range(2).concatenate(Dataset.range(3).shuffle(2).repeat(2)),
        Dataset.range(3).shuffle(2).batch(2).enumerate(),
        Dataset.sample_from_datasets([Dataset.range(2), Dataset.range(3).shuffle(2)]),
        Dataset.sample_from_datasets([Dataset.range(2), Dataset.range(2)]).cache(),
        Dataset.range(2).shuffle(2).batch(1).cache(),
        Dataset.range(3).filter(bool).repeat(2).cache(),
        Dataset.range(2).cache("never written"),
        Dataset.range(2).cache("never written").shuffle(2),
        Dataset.range(3).shuffle(2).window(2),
    ):
        with pytest.raises(UnimplementedError, match="cannot be split between workers"):
            dataset.node.source_length()


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\r\n\nümlaut")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("last\n")
    found = [str(line) for line in Dataset.from_files(str(tmp_path / "*.txt"))]
    assert found == ["one", "two", "", "ümlaut", "last"]
    values_ = [{"a": 1, "b": [1.5, 2]}, {"a": 2, "b": [0.5, 1]}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, values_)))
    elements = list(Dataset.from_files(tmp_path / "d.jsonl"))
    assert [int(e["a"]) for e in elements] == [1, 2]
    assert elements[1]["b"].tolist() == [0.5, 1]
    table = np.arange(6).reshape(3, 2)
    for name in ("e.npy", "f.npy"):
        np.save(tmp_path / name, table)
    np.savez(tmp_path / "g.npz", x=table, y=np.arange(3))
    found = list(Dataset.from_files([tmp_path / "e.npy", tmp_path / "f.npy"]))
    np.testing.assert_array_equal(found, np.concatenate([table, table]))
    found = list(Dataset.from_files(tmp_path / "g.npz"))
    assert [int(e["y"]) for e in found] == [0, 1, 2]
    assert Dataset.from_files(tmp_path / "g.npz").element_spec["x"] == ArraySpec((2,), int)


def test_wrong_files(tmp_path):
    for pattern in (tmp_path / "absent.txt", tmp_path / "*.npy", []):
        with pytest.raises(NotFoundError, match="file"):
            Dataset.from_files(pattern if isinstance(pattern, list) else str(pattern))
    (tmp_path / "x.what").write_text("")
    with pytest.raises(ValueError, match="give one of"):
        Dataset.from_files(tmp_path / "x.what")
    with pytest.raises(ValueError, match="not 'parquet'"):
        Dataset.from_files(tmp_path / "x.what", "parquet")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    with (
        iter(Dataset.from_files(tmp_path / "bad.jsonl")) as elements,
        pytest.raises(DataLossError, match="line at byte 9 of"),
    ):
        list(elements)
    (tmp_path / "bad.npy").write_bytes(b"no array")
    with pytest.raises(DataLossError, match=r"cannot read .*bad\.npy"):
        list(Dataset.from_files(tmp_path / "bad.npy"))
    np.savez(tmp_path / "bad.npz", a=np.zeros(2), b=np.zeros(3))
    with pytest.raises(DataLossError, match="not equally many"):
        list(Dataset.from_files(tmp_path / "bad.npz"))


@pytest.mark.parametrize(
    ("dataset", "shape"),
    [
        (Dataset.range(9).batch(2), (None,)),
        (Dataset.range(9).batch(2, drop_remainder=True), (2,)),
        (Dataset.range(9).batch(2).batch(3, drop_remainder=True), (3, None)),
        (Dataset.range(9).map(lambda i: np.zeros((2, 3))).shuffle(3).batch(2), (None, 2, 3)),
        (Dataset.from_tensor_slices(np.zeros((5, 4))).take(2).skip(1).repeat(), (4,)),
        (Dataset.from_tensor_slices(np.zeros((5, 4))).unbatch(), ()),
        (rows([1, 2]).padded_batch(2), (None, None)),
        (rows([1, 2]).padded_batch(2, (7,)), (None, 7)),
        (rows([1, 2]).bucket_by_sequence_length(len, [4], [2, 2]), (None, None)),
        (Dataset.range(3).flat_map(lambda i: Dataset.range(2)), ()),
        (Dataset.range(0).concatenate(Dataset.from_tensor_slices(np.zeros((2, 5)))), (5,)),
        (Dataset.choose_from_datasets([Dataset.range(2)], Dataset.range(1)), ()),
    ],
)
def test_shapes_of_elements(dataset, shape):
    assert dataset.element_spec.shape == shape


def test_no_element_to_look_at():
    with pytest.raises(ValueError, match="has no element"):
        _ = Dataset.range(0).map(lambda i: i).element_spec


def test_descriptions_can_be_sent():
    datasets = [
        Dataset.range(9).filter(lambda i: i % 2).enumerate().window(2).flat_map(lambda i, x: x),
        Dataset.zip(Dataset.range(3), Dataset.range(3).cache()),
        Dataset.sample_from_datasets([Dataset.range(3)] * 2, seed=3),
        Dataset.from_source(iter_of_three()).padded_batch(2),
    ]
    for dataset in datasets:
        again = pickle.loads(cloudpickle.dumps(dataset))
        assert again.node.summary() == dataset.node.summary()
        for one, other in itertools.zip_longest(dataset, again):
            np.testing.assert_array_equal(one, other)


class iter_of_three:
    def __iter__(self):
        return iter([np.ones(n) for n in range(3)])


def test_array_specs():
    assert ArraySpec([None, 3], "float32") == ArraySpec((None, 3), np.float32)
    assert ArraySpec([np.int64(2)], int).shape == (2,)
    assert hash(ArraySpec((), int)) == hash(ArraySpec([], "int64"))
    for shape, dtype, error in [
        ((-1,), int, ValueError), ((1.5,), int, TypeError), (("2",), int, TypeError),
        ((2,), "nonsense", TypeError), (3, int, TypeError),
    ]:  # fmt: skip
        with pytest.raises(error):
            ArraySpec(shape, dtype)


@pytest.mark.parametrize("how", ["batch", "padded", "window", "bucket"])
def test_keys_in_another_order(how):
    source = Dataset.from_source(
        [{"x": 1, "y": {"a": 10, "b": 20}}, {"y": {"b": 40, "a": 30}, "x": 2}]
    )
    if how == "batch":
        (found,) = source.batch(2)
    elif how == "padded":
        (found,) = source.padded_batch(2)
    elif how == "bucket":
        (found,) = source.bucket_by_sequence_length(lambda element: 1, [2], [2, 2])
    else:
        (window,) = source.window(2)
        found = {
            "x": np.array(list(window["x"])),
            "y": {key: np.array(list(window["y"][key])) for key in "ab"},
        }
    assert found["x"].tolist() == [1, 2]
    assert found["y"]["a"].tolist() == [10, 30]
    assert found["y"]["b"].tolist() == [20, 40]


@pytest.mark.parametrize("other", [{"y": 1}, {"x": 1, "y": 2}, 3, (1,)])
def test_windows_of_different_structures(other):
    with pytest.raises(InvalidArgumentError, match="different structure"):
        list(Dataset.from_source([{"x": 1}, other]).window(2))


def test_shapes_and_values_go_by_their_keys():
    elements = [{"a": np.zeros(1), "b": np.zeros(1)}]
    (batch,) = Dataset.from_source(elements).padded_batch(
        1, padded_shapes={"b": [5], "a": [2]}, padding_values={"b": 7, "a": 1}
    )
    assert batch["a"].tolist() == [[0, 1]]
    assert batch["b"].tolist() == [[0, 7, 7, 7, 7]]
    with pytest.raises(InvalidArgumentError, match="for elements of the structure"):
        list(Dataset.from_source(elements).padded_batch(1, padding_values={"a": 1, "c": 2}))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *(("i4", 0.5), ("u1", -1), ("u1", 300), ("i4", np.nan), ("?", 2), ("i4", "7"), ("U3", 1)),
        *(("i8", 1 << 70), ("f2", 1e6), ("f4", 1j), ("i4", 1j), ("i4", "x")),
    ],
)
def test_values_that_arrays_do_not_hold(dtype, value):
    elements = [np.ones(1, dtype), np.ones(2, dtype)]
    for batches in (
        Dataset.from_source(elements).padded_batch(2, padding_values=value),
        Dataset.from_source(elements).bucket_by_sequence_length(
            len, [9], [2, 2], padding_values=value
        ),
    ):
        with pytest.raises(InvalidArgumentError, match="cannot be padded with"):
            list(batches)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("f4", 7), ("f4", 0.1), ("f2", np.inf), ("f4", 1 << 70), ("i8", 3.0), ("?", 1), ("O", "x")],
)
def test_values_that_arrays_hold(dtype, value):
    (batch,) = Dataset.from_source([np.zeros(0, dtype), np.ones(2, dtype)]).padded_batch(
        2, padding_values=value
    )
    np.testing.assert_array_equal(batch[0], np.full(2, value, dtype))


def test_buckets_of_sequences_with_labels():
    elements = [(np.ones(n), n, np.ones((n, 2))) for n in (1, 2)]
    pairs = Dataset.from_source(elements).bucket_by_sequence_length(
        lambda sequence, *_: len(sequence), [5], [2, 2], pad_to_bucket_boundary=True
    )
    ((sequences, labels, tables),) = pairs
    assert (sequences.shape, labels.tolist(), tables.shape) == ((2, 4), [1, 2], (2, 4, 2))
    (batch,) = Dataset.from_source([np.ones(1), np.ones(1)]).bucket_by_sequence_length(
        len, [5], [2, 2], padded_shapes=[None], pad_to_bucket_boundary=True
    )
    assert batch.shape == (2, 4)
