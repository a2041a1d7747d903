"""Datasets for torch's DataLoader."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dataservice import Dataset, DispatchServer, WorkerServer, distribute
from dataservice.torch import IterableDataset
from mpidist.errors import DataLossError, InvalidArgumentError, UnimplementedError


def make_dataset():
    return Dataset.range(10).shuffle(10, seed=1)


def numbers_of(elements):
    return [int(element) for element in elements]


@pytest.fixture
def service():
    dispatcher = DispatchServer()
    workers = [WorkerServer(dispatcher_address=dispatcher.target) for _ in range(2)]
    yield dispatcher.target
    for worker in workers:
        worker.stop()
    dispatcher.stop()


DTYPES = ["bool", "uint8", "int16", "int64", "uint32", "float16", "float64", "complex64"]


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_dtypes(dtype):
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    (element,) = IterableDataset(Dataset.from_tensors({"x": (array, array[0, 1])}))
    whole, scalar = element["x"]
    assert (whole.shape, scalar.shape) == ((2, 3), ())
    assert str(whole.dtype) == f"torch.{array.dtype.name}"
    assert whole.to(torch.complex128).tolist() == array.astype(complex).tolist()
    assert scalar.to(torch.complex128).item() == 1


def test_read_only_and_reversed_arrays_are_copied():
    array = np.arange(6.0)
    with warnings.catch_warnings(action="error"):
        (frozen,) = IterableDataset(Dataset.from_tensors(array))
        (reverse,) = IterableDataset(Dataset.from_tensors(array).map(lambda x: x[::-1]))
    frozen[0] = 7
    assert array[0] == 0
    assert reverse.tolist() == [5, 4, 3, 2, 1, 0]


def test_arrays_that_torch_cannot_view_are_copied():
    big_endian = np.arange(4, dtype=">f4").reshape(2, 2)
    field = np.zeros(3, [("a", "u1"), ("b", "i4")])["b"]
    first, second = IterableDataset(Dataset.from_source([big_endian, field]))
    assert (first.dtype, first.tolist()) == (torch.float32, [[0, 1], [2, 3]])
    assert (second.dtype, second.tolist()) == (torch.int32, [0, 0, 0])


def test_other_leaves_stay_as_they_are():
    data = {"text": np.array("word"), "when": np.datetime64("2020-01-01"), "x": torch.ones(2)}
    (element,) = IterableDataset(Dataset.from_source([data]))
    assert str(element["text"]) == "word"
    assert element["when"] == data["when"]
    assert torch.equal(element["x"], data["x"])


def test_data_loader():
    batches = DataLoader(IterableDataset(Dataset.range(7)), batch_size=3)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    whole = DataLoader(IterableDataset(Dataset.range(7).batch(3)), batch_size=None)
    assert [batch.tolist() for batch in whole] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads
def test_data_loader_with_processes():
    with pytest.raises(UnimplementedError, match="num_workers=1 of the DataLoader must be 0"):
        list(DataLoader(IterableDataset(Dataset.range(4)), None, num_workers=1))


@pytest.mark.parametrize("read", [0, 1, 9, 10, 14, 20, 23])
def test_a_state_continues_through_the_epochs(read):
    uninterrupted = IterableDataset(make_dataset())
    expected = [number for _ in range(3) for number in numbers_of(uninterrupted)]
    first = IterableDataset(make_dataset())
    seen = []
    while len(seen) < read:
        for number in first:
            seen.append(int(number))
            if len(seen) == read and read % 10:
                break
    state = first.state_dict()
    later = IterableDataset(make_dataset())
    later.load_state_dict(state)
    assert later.state_dict() == state
    while len(seen) < len(expected):
        seen += numbers_of(later)
    assert seen == expected


def test_a_state_taken_after_an_epoch_does_not_skip_the_next():
    dataset, expected = IterableDataset(make_dataset()), IterableDataset(make_dataset())
    for _ in range(3):
        dataset.state_dict()
        assert numbers_of(dataset) == numbers_of(expected)


def test_a_state_over_a_service(service):
    def make():
        apply = distribute("distributed_epoch", service, deterministic=True, num_shards=3)
        return IterableDataset(Dataset.range(60).batch(4).apply(apply))

    dataset = make()
    elements = iter(dataset)
    begin = [next(elements).tolist() for _ in range(6)]
    state = dataset.state_dict()
    later = make()
    later.load_state_dict(state)
    rest = [batch.tolist() for batch in later]
    assert rest == [batch.tolist() for batch in elements]
    assert begin + rest == np.arange(60).reshape(15, 4).tolist()


def test_an_iterator_without_elements_uses_no_state_and_no_epoch():
    dataset, expected = IterableDataset(make_dataset()), IterableDataset(make_dataset())
    iter(dataset)
    assert numbers_of(dataset) == numbers_of(expected)
    dataset.load_state_dict(dataset.state_dict())
    iter(dataset)
    assert numbers_of(dataset) == numbers_of(expected)


def test_bad_states():
    dataset = IterableDataset(make_dataset())
    with pytest.raises(InvalidArgumentError, match="a dict made by state_dict"):
        dataset.load_state_dict({"epoch": 3})
    with pytest.raises(InvalidArgumentError, match="belongs to an iterator over"):
        dataset.load_state_dict(IterableDataset(Dataset.range(3)).state_dict())
    with pytest.raises(DataLossError, match="damaged"):
        dataset.load_state_dict({"dataset_iterator": b"no pickle"})
