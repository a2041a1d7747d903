"""Text as elements: what ends with NUL, what is in arrays of objects, and how it is filled up."""

import json

import numpy as np
import pytest

from dataservice import Dataset, distribute
from dataservice.dataset.spec import ArraySpec
from mpidist.errors import InvalidArgumentError

NUL = [b"a\0", "b\0\0", b"\0"]


def same(found, expected):
    """Equal, of the same type, and text of the same length."""
    assert type(found) is type(expected)
    assert found == expected


@pytest.mark.parametrize("text", NUL)
@pytest.mark.parametrize(
    "make",
    [
        lambda text: Dataset.range(1).map(lambda i: text),
        lambda text: Dataset.range(1).map(lambda i: text, num_parallel_calls=2),
        lambda text: Dataset.range(1).map(lambda i: text, num_parallel_calls=1, processes=True),
        lambda text: Dataset.range(1).map(lambda i: np.array([text], object)).unbatch(),
        lambda text: Dataset.range(1).map(lambda i: type(np.asarray(text)[()])(text)),
        lambda text: Dataset.from_generator(lambda: iter([text])),
        lambda text: Dataset.from_source([text]),
        lambda text: Dataset.from_tensors(text),
        lambda text: Dataset.from_tensor_slices([text]),
        lambda text: Dataset.from_tensor_slices(np.array([text], object)),
        lambda text: Dataset.from_tensor_slices([text]).batch(1).unbatch(),
        lambda text: Dataset.from_tensor_slices([text]).padded_batch(1).unbatch(),
        lambda text: Dataset.from_tensor_slices([text]).cache(),
    ],
)
def test_text_that_ends_with_nul_comes_out_whole(make, text):
    dataset = make(text)
    for elements in (dataset, dataset.as_numpy_iterator()):
        (element,) = elements
        same(element, text)
    assert dataset.element_spec == ArraySpec((), np.asarray(text).dtype)


def test_text_that_ends_with_nul_in_lists():
    lists = [[b"a\0", b"bcd"], [b"", b"\0"]]
    (element,) = Dataset.from_source([lists])
    assert element.dtype == object
    assert element.tolist() == lists
    (element,) = Dataset.from_tensors({"text": lists})
    assert element["text"].tolist() == lists
    assert [row.tolist() for row in Dataset.from_tensor_slices(lists)] == lists


@pytest.mark.parametrize("group", [Dataset.batch, Dataset.padded_batch])
def test_batches_of_text_that_may_end_with_nul(group):
    texts = [b"a", b"b\0", b"", b"cd"]
    first, second = group(Dataset.from_source(texts), 2)
    assert (first.dtype, first.tolist()) == (object, texts[:2])
    assert (second.dtype, second.tolist()) == ("S2", texts[2:])
    again = [*Dataset.from_source(texts[::-1]).apply(lambda dataset: group(dataset, 4))]
    assert again[0].tolist() == texts[::-1]
    assert list(group(Dataset.from_source(texts), 2).unbatch()) == texts


def test_a_fold_over_text_that_ends_with_nul():
    found = Dataset.from_source([b"a\0", b"b\0"]).reduce(b"\0", lambda state, text: state + text)
    same(found, b"\0a\0b\0")


def test_lines_that_end_with_nul(tmp_path):
    text, values = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("a\0\nb\n")
    values.write_text(json.dumps({"a": "b\0"}))
    assert [str(line) for line in Dataset.from_files(text)] == ["a\0", "b"]
    assert list(Dataset.from_files(values)) == [{"a": "b\0"}]


def test_a_snapshot_of_text_that_ends_with_nul(tmp_path):
    texts = [{"t": b"a\0", "u": "\0"}, {"t": b"b", "u": ""}]
    Dataset.from_source(texts).save(tmp_path / "saved")
    loaded = Dataset.load(tmp_path / "saved")
    assert list(loaded) == texts
    (batch,) = loaded.batch(2)
    assert batch["t"].tolist() == [b"a\0", b"b"]


@pytest.mark.parametrize("group", [None, 3])
def test_text_that_ends_with_nul_through_a_service(make_service, group):
    texts = [b"a\0", b"b", b"\0\0", b"a" * 50_000 + b"\0"]
    dataset = Dataset.from_source(texts)
    dataset = dataset if group is None else dataset.batch(group)
    there = dataset.apply(distribute("distributed_epoch", make_service(2).target))
    there = there if group is None else there.unbatch()
    assert sorted(there) == sorted(texts)


def test_text_among_numbers_does_not_batch():
    for values in ([np.str_("a"), np.float64(1)], [np.int64(1), b"a\0"], [b"a\0", np.int64(1)]):
        with pytest.raises(InvalidArgumentError, match="different dtypes or shapes in component 0"):
            list(Dataset.from_source(values).batch(2))


def test_text_has_no_rows():
    for text in ("abc", "a\0"):
        with pytest.raises(InvalidArgumentError, match="unbatch needs arrays"):
            list(Dataset.from_source([text]).unbatch())


def test_columns_of_objects_are_what_their_objects_are():
    columns = {"s": np.array(["a", "bcd"], object), "n": np.array([1, 2], object)}
    dataset = Dataset.from_tensor_slices(columns)
    first, _ = dataset
    assert (type(first["s"]), type(first["n"])) == (np.str_, np.int64)
    assert dataset.element_spec == {"s": ArraySpec((), "U1"), "n": ArraySpec((), np.int64)}
    (batch,) = dataset.batch(2)
    np.testing.assert_array_equal(batch["s"], np.array(["a", "bcd"]), strict=True)
    np.testing.assert_array_equal(batch["n"], np.array([1, 2]), strict=True)
    (whole,) = Dataset.from_tensors(columns)
    assert whole["s"].dtype == object


def test_a_column_of_objects_without_rows():
    dataset = Dataset.from_tensor_slices(np.array([], object))
    assert list(dataset) == []
    assert dataset.element_spec == ArraySpec((), object)


def test_ragged_columns_of_objects():
    ragged = np.array([None, None], object)
    ragged[:] = [[1, 2], [3]]
    (batch,) = Dataset.from_tensor_slices(ragged).padded_batch(2)
    np.testing.assert_array_equal(batch, np.array([[1, 2], [3, 0]]), strict=True)


@pytest.mark.parametrize(
    ("texts", "value", "expected"),
    [
        ([["a"], ["b", "c"]], "PAD", np.array([["a", "PAD"], ["b", "c"]])),
        ([[b"a"], [b"b", b"c"]], b"PAD", np.array([[b"a", b"PAD"], [b"b", b"c"]])),
        ([[b"a"], [b"b", b"c"]], "PAD", np.array([[b"a", b"PAD"], [b"b", b"c"]])),
        ([["a"], ["bcd", "c"]], "-", np.array([["a", "-"], ["bcd", "c"]])),
        ([["a"], ["b", "c"]], None, np.array([["a", ""], ["b", "c"]])),
        ([[b"a"], [b"b", b"c"]], b"\0", np.array([[b"a", b"\0"], [b"b", b"c"]], object)),
        ([[b"a"], [b"b", b"c\0"]], None, np.array([[b"a", b""], [b"b", b"c\0"]], object)),
        ([["a"], ["b", "c\0"]], None, np.array([["a", ""], ["b", "c\0"]], object)),
        ([["a"], ["b", "c\0"]], "PAD", np.array([["a", "PAD"], ["b", "c\0"]], object)),
    ],
)
def test_text_is_filled_up_with_whole_text(texts, value, expected):
    (batch,) = Dataset.from_source(texts).padded_batch(2, padding_values=value)
    np.testing.assert_array_equal(batch, expected, strict=True)


@pytest.mark.parametrize(("empty", "value"), [("", "x\0"), (b"", b"x\0")])
def test_arrays_of_objects_are_filled_up_with_text_of_their_kind(empty, value):
    text = empty + value[:1]
    arrays = [np.array([], object), np.array([text], object)]
    (batch,) = Dataset.from_source(arrays).padded_batch(2)
    assert batch.tolist() == [[empty], [text]]
    (batch,) = Dataset.from_source(arrays).padded_batch(2, padding_values=value)
    assert batch.tolist() == [[value], [text]]


def test_text_that_ends_with_nul_fills_up_no_numbers():
    for arrays in ([[1], [2, 3]], [["a"], ["b", "c"]]):
        dataset = Dataset.from_source(arrays).padded_batch(2, padding_values=b"x\0")
        with pytest.raises(InvalidArgumentError, match="cannot be padded"):
            list(dataset)


@pytest.mark.parametrize("values", [[1], [], np.zeros(2), {"a": [1]}, (0, np.zeros((1, 1)))])
def test_values_that_are_no_scalars_fill_up_nothing(values):
    with pytest.raises(InvalidArgumentError, match="padding_values must be a scalar"):
        Dataset.range(3).padded_batch(2, padding_values=values)
