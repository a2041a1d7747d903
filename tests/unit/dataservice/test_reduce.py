"""``from_tensors``, ``reduce`` and ``get_single_element``."""

import cloudpickle
import numpy as np
import pytest

from dataservice import ArraySpec, Dataset, distribute
from mpidist.errors import InvalidArgumentError


def test_tensors_are_the_only_element():
    array = np.arange(6).reshape(2, 3)
    dataset = Dataset.from_tensors({"a": array, "b": (3, "text", [1.5, 2.5])})
    assert len(dataset) == 1
    for _ in range(2):
        (element,) = dataset
        assert np.shares_memory(element["a"], array)
        assert element["a"].tolist() == array.tolist()
        assert (element["b"][0], element["b"][1]) == (3, "text")
        assert isinstance(element["b"][0], np.int64)
        assert element["b"][2].tolist() == [1.5, 2.5]
        with pytest.raises(ValueError, match="read-only"):
            element["a"][0] = 1
    assert dataset.element_spec["a"] == ArraySpec((2, 3), np.int64)
    assert dataset.element_spec["b"][0] == ArraySpec((), np.int64)
    assert repr(Dataset.from_tensors(array)) == "<Dataset from_tensors('int64[2, 3]')>"
    again = cloudpickle.loads(cloudpickle.dumps(dataset))
    assert repr(again) == repr(dataset)
    assert [x.tolist() for x in Dataset.from_tensors(array).unbatch()] == array.tolist()
    with pytest.raises(ValueError, match="from_tensors need at least one array"):
        Dataset.from_tensors({})


@pytest.mark.parametrize("mode", ["parallel_epochs", "distributed_epoch"])
def test_tensors_from_workers(make_service, mode):
    dataset = Dataset.from_tensors((1, np.zeros((2, 2)))).apply(
        distribute(mode, make_service(2).target)
    )
    assert sum(int(one) for one, _ in dataset) == (2 if mode == "parallel_epochs" else 1)


def test_reduce():
    numbers = Dataset.range(5)
    assert numbers.reduce(0, lambda state, x: state + x) == 10
    assert isinstance(Dataset.range(0).reduce(3, max), np.int64)
    pairs = Dataset.zip(numbers, numbers.map(lambda x: x * x))
    total, count = pairs.reduce(
        (0, 0), lambda state, pair: (state[0] + pair[0] * pair[1], state[1] + 1)
    )
    assert (total, count) == (100, 5)
    assert numbers.reduce("", lambda state, x: f"{state}{x}") == "01234"


def test_what_reduce_refuses():
    with pytest.raises(TypeError, match="reduce needs a function as reduce_func, not 3"):
        Dataset.range(3).reduce(0, 3)
    with pytest.raises(RuntimeError, match="given to reduce raised StopIteration"):
        Dataset.range(3).reduce(0, lambda state, x: next(iter(())))
    with pytest.raises(InvalidArgumentError):
        Dataset.from_source([np.zeros(1), np.zeros(2)]).batch(2).reduce(0, lambda state, x: state)


def test_the_only_element():
    assert Dataset.range(9).batch(9).get_single_element().tolist() == [*range(9)]
    assert Dataset.from_tensors({"a": (1, "x")}).get_single_element() == {"a": (1, "x")}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.range(0), "has none"),
        (Dataset.range(2), "has more"),
        (Dataset.range(1).repeat().prefetch(2), "has more"),
    ],
)
@pytest.mark.usefixtures("no_thread_is_left_behind")
def test_what_is_not_the_only_element(dataset, message):
    with pytest.raises(InvalidArgumentError, match=f"get_single_element needs .* {message}"):
        dataset.get_single_element()


def test_the_only_element_of_a_service(make_service):
    target = make_service(2).target
    dataset = Dataset.range(9).batch(9)
    apply = distribute("distributed_epoch", target)
    assert dataset.apply(apply).get_single_element().tolist() == [*range(9)]
    with pytest.raises(InvalidArgumentError, match="has more"):
        dataset.apply(distribute("parallel_epochs", target)).get_single_element()
