"""Elements of what has a buffer: the same in this process, from workers, and from disk."""

import numpy as np
import pytest

from dataservice import ArraySpec, Dataset, distribute

SQUARE = np.arange(6, dtype=np.int16).reshape(2, 3)
VIEWS = [
    memoryview(b"abc"),
    memoryview(bytearray(b"def")),
    memoryview(SQUARE),
    memoryview(SQUARE.T),
]
ARRAYS = [np.asarray(view) for view in VIEWS]


def view_of(number):
    return {"view": VIEWS[number], "bytes": bytearray(b"xyz")}


def datasets(tmp_path, target):
    numbers = Dataset.range(len(VIEWS))
    mapped = numbers.map(view_of)
    mapped.save(tmp_path)
    yield mapped
    yield numbers.map(view_of, num_parallel_calls=2)
    yield numbers.map(view_of, num_parallel_calls=1, processes=True)
    yield Dataset.from_source([view_of(number) for number in range(len(VIEWS))])
    yield Dataset.from_generator(lambda: (view_of(number) for number in range(len(VIEWS))))
    yield mapped.apply(distribute("distributed_epoch", target))
    yield mapped.map(lambda element: element).apply(distribute("parallel_epochs", target))
    yield Dataset.load(tmp_path)


def test_views_are_arrays_wherever_they_come_from(make_service, tmp_path):
    for dataset in datasets(tmp_path / "saved", make_service(1).target):
        elements = list(dataset)
        assert len(elements) == len(VIEWS)
        for element, expected in zip(elements, ARRAYS, strict=True):
            assert type(element["view"]) is np.ndarray
            assert element["view"].dtype == expected.dtype
            np.testing.assert_array_equal(element["view"], expected)
            assert type(element["bytes"]) is bytearray
            assert element["bytes"] == b"xyz"
        assert dataset.element_spec["view"] == ArraySpec((3,), np.uint8)


def test_a_view_is_not_copied():
    array = np.arange(3)
    (element,) = Dataset.from_source([memoryview(array)])
    assert np.shares_memory(element, array)


@pytest.mark.parametrize("group", [Dataset.batch, Dataset.padded_batch])
def test_views_can_be_batched(group):
    (batch,) = group(Dataset.range(2).map(lambda i: memoryview(bytes([i, 7]))), 2)
    assert batch.tolist() == [[0, 7], [1, 7]]
