"""The element_spec of datasets that are read one after the other."""

import numpy as np
import pytest

from dataservice import Dataset
from dataservice.dataset.spec import ArraySpec
from mpidist.errors import InvalidArgumentError

NONE = Dataset.range(3).filter(lambda i: False).map(lambda i: i)


def concatenated(*datasets):
    whole = datasets[0]
    for dataset in datasets[1:]:
        whole = whole.concatenate(dataset)
    return whole


def sampled(*datasets):
    return Dataset.sample_from_datasets(datasets)


def chosen(*datasets):
    return Dataset.choose_from_datasets(datasets, Dataset.range(len(datasets)))


several = pytest.mark.parametrize("several", [concatenated, sampled, chosen])


def only(shape, dtype=np.float64):
    return Dataset.from_tensors(np.zeros(shape, dtype))


def mapped(dataset):
    return dataset.map(lambda element: element)


@several
@pytest.mark.parametrize("change", [mapped, lambda dataset: dataset])
def test_lengths_that_differ_are_unknown(several, change):
    found = several(change(only((2, 3))), change(only((2, 4))), change(only((2, 3))))
    assert found.element_spec == ArraySpec((2, None), np.float64)
    first, second = ({"a": only((1,)), "b": only(())}, {"b": only(()), "a": only((2,))})
    found = several(change(Dataset.zip(first)), change(Dataset.zip(second)))
    assert found.element_spec["a"] == ArraySpec((None,), np.float64)
    assert found.element_spec["b"] == ArraySpec((), np.float64)
    assert len(list(found)) == 2


@several
def test_text_of_any_length_is_alike(several):
    found = several(only((1,), "U2"), only((1,), "U5"), Dataset.from_tensors(["a\0"]))
    assert found.element_spec == ArraySpec((1,), object)
    assert several(only((), "S2"), only((), "S5")).element_spec == ArraySpec((), "S5")
    assert several(only((), ">i4"), only((), "<i4")).element_spec == ArraySpec((), "i4")


@several
def test_datasets_without_elements_say_nothing(several):
    assert several(NONE, only((2,))).element_spec == ArraySpec((2,), np.float64)
    assert several(only((2,)), NONE).element_spec == ArraySpec((2,), np.float64)
    assert several(only((3,)).take(0), only((2,))).element_spec == ArraySpec((2,), np.float64)
    with pytest.raises(ValueError, match="has no element that could describe"):
        _ = several(NONE, NONE).element_spec


def test_datasets_that_are_never_drawn_say_nothing():
    found = Dataset.sample_from_datasets([only((2,)), mapped(only(()))], [1, 0])
    assert found.element_spec == ArraySpec((2,), np.float64)


@several
@pytest.mark.parametrize(
    "other", [Dataset.range(2), Dataset.from_tensors((1.0,)), only((2,), "U3")]
)
def test_elements_that_are_known_to_differ(several, other):
    with pytest.raises(TypeError, match="elements have the same structure and dtypes"):
        several(only((2,)), other.batch(2).repeat())
    late = several(only((2,)), mapped(other))
    with pytest.raises(InvalidArgumentError, match="datasets have different elements"):
        _ = late.element_spec


@several
def test_dimensions_that_differ(several):
    found = several(only((2,)), only((2, 2)))
    assert len(list(found)) == 2
    with pytest.raises(InvalidArgumentError, match="datasets have different elements"):
        _ = found.element_spec


@pytest.mark.parametrize("join", ["concatenate", "sample"])
def test_functions_are_not_called_while_datasets_are_put_together(join):
    def never(*arguments):
        raise RuntimeError("called")

    numbers = Dataset.range(3)
    made = [
        numbers.scan(0, never),
        numbers.group_by_window(lambda x: 0, never, window_size=2),
        numbers.map(never),
    ]
    for dataset in made:
        if join == "concatenate":
            dataset.concatenate(numbers)
        else:
            Dataset.sample_from_datasets([dataset, numbers])


def test_what_cannot_be_told_of_parts_is_told_in_a_pass():
    several = Dataset.from_tensors(np.zeros(4)).concatenate(Dataset.from_tensors(np.zeros((2, 2))))
    joined = several.unbatch().concatenate(Dataset.from_tensors(np.zeros(2)))
    assert [np.shape(element) for element in joined] == [(), (), (), (), (2,), (2,), (2,)]


def test_endless_numbers_have_a_dtype():
    with pytest.raises(TypeError, match="structure and dtypes"):
        Dataset.counter().concatenate(Dataset.from_tensors("a"))
