"""Iterators saved by torch's names, as torchdata's StatefulDataLoader and torch trainers do."""

import copy
import pickle
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import pytest

from dataservice import Dataset, distribute
from mpidist.errors import DataLossError, InvalidArgumentError


@runtime_checkable
class Stateful(Protocol):
    """As in torchdata.stateful and torch.distributed.checkpoint.stateful."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Loader:
    """A loader that saves the iterator of its dataset, in the steps of StatefulDataLoader."""

    def __init__(self, dataset):
        self.dataset = dataset
        self._iterator = None
        self._restored = None

    def __iter__(self):
        self._iterator = iter(self.dataset)
        assert isinstance(self._iterator, Stateful)
        if self._restored is not None:
            self._iterator.load_state_dict(self._restored["_iterator"])
            self._restored = None
        yield from self._iterator

    def state_dict(self):
        return {"_iterator": copy.deepcopy(self._iterator.state_dict())}

    def load_state_dict(self, state_dict):
        self._restored = state_dict


def pipeline():
    return Dataset.range(40).shuffle(7, seed=3).map(lambda i: i * 2).batch(3).prefetch(2)


@pytest.mark.parametrize("read", [0, 1, 5, 14])
def test_a_loader_continues_where_another_was_saved(read):
    loader = Loader(pipeline())
    elements = iter(loader)
    for _ in range(read):
        next(elements)
    if not read:
        loader._iterator = iter(loader.dataset)
        elements = loader._iterator
    saved = pickle.dumps(loader.state_dict())
    rest = [batch.tolist() for batch in elements]

    later = Loader(pipeline())
    later.load_state_dict(pickle.loads(saved))
    assert [batch.tolist() for batch in later] == rest


def test_both_forms_are_one_state():
    dataset = pipeline()
    one, other = iter(dataset), dataset.as_numpy_iterator()
    list(islice(one, 4))
    state = one.state_dict()
    assert list(state.values()) == [one.get_state()]
    other.load_state_dict(state)
    expected = [batch.tolist() for batch in one]
    assert [batch.tolist() for batch in other] == expected
    other.set_state(state["dataset_iterator"])
    assert [batch.tolist() for batch in other] == expected


def test_the_next_pass_follows_the_restored_one():
    first = pipeline()
    expected = [[batch.tolist() for batch in first] for _ in range(4)]
    second = pipeline()
    list(second)
    elements = iter(second)
    next(elements)
    later = pipeline()
    restored = iter(later)
    restored.load_state_dict(elements.state_dict())
    assert [batch.tolist() for batch in restored] == expected[1][1:]
    assert [batch.tolist() for batch in later] == expected[2]
    assert [batch.tolist() for batch in later] == expected[3]


def test_an_iterator_over_a_service(make_service):
    dataset = Dataset.range(60).batch(4)
    dataset = dataset.apply(
        distribute("distributed_epoch", make_service(2).target, deterministic=True, num_shards=3)
    )
    with iter(dataset) as elements:
        list(islice(elements, 5))
        state = elements.state_dict()
        rest = [batch.tolist() for batch in elements]
    with iter(dataset) as elements:
        elements.load_state_dict(state)
        assert [batch.tolist() for batch in elements] == rest


@pytest.mark.parametrize("state", [{}, b"bytes", None, {"dataset_iterator": b"", "epoch": 1}])
def test_a_dict_from_elsewhere(state):
    with pytest.raises(InvalidArgumentError, match="a dict made by state_dict"):
        iter(Dataset.range(2)).load_state_dict(state)


def test_errors_of_the_state_within():
    elements = iter(Dataset.range(2))
    with pytest.raises(DataLossError, match="damaged"):
        elements.load_state_dict({"dataset_iterator": b"no pickle"})
    with pytest.raises(InvalidArgumentError, match="belongs to an iterator over range"):
        elements.load_state_dict(iter(Dataset.range(3)).state_dict())
