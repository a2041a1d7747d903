import numpy as np
import pytest

from dataservice.dataset import Dataset
from dataservice.errors import pack_error, unpack_error
from dataservice.payload import pack_dataset, pack_elements, unpack, unpack_dataset


def test_large_arrays_are_not_copied():
    large, small = np.arange(100_000), np.arange(3)
    parcel = pack_elements([{"large": large, "small": (small, np.int64(7))}])
    assert len(parcel.buffers) == 1
    assert len(parcel.pickle) < 1000
    assert np.shares_memory(parcel.buffers[0], large)
    (element,) = unpack(parcel.pickle, parcel.buffers)
    assert np.shares_memory(element["large"], large)
    np.testing.assert_array_equal(element["large"], large)
    np.testing.assert_array_equal(element["small"][0], small)
    assert element["small"][1] == 7


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.arange(60_000.0).reshape(200, 300).T,
        np.arange(60_000)[::2],
        np.array(["a", "bc"]),
        np.array([None, "x"], object),
        np.zeros(40_000, [("a", "i4"), ("b", "f8")]),
        np.float32(1.5),
        np.array(5),
    ],
)
def test_every_array_comes_back(array):
    parcel = pack_elements([array])
    (copy,) = unpack(parcel.pickle, [np.array(buffer) for buffer in parcel.buffers])
    assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(copy, array)


def test_elements_of_classes_that_pickle_cannot_name():
    class Local:
        value = 3

    parcel = pack_elements([Local()])
    assert unpack(parcel.pickle, parcel.buffers)[0].value == 3


class Lacking:
    """An object that runs a given statement when it is unpickled."""

    def __init__(self, text):
        self._text = text

    def __reduce__(self):
        return exec, (self._text,)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("import not_there", ModuleNotFoundError, "No module named 'not_there': the dataset needs"),
        ("from json import not_there", ImportError, "cannot import name 'not_there'"),
        ("import json; json.not_there", AttributeError, "has no attribute 'not_there': the"),
    ],
)
def test_a_dataset_of_modules_that_are_not_here(text, kind, told):
    parcel = pack_dataset(Dataset.from_generator(range, (Lacking(text),)).node)
    with pytest.raises(kind, match=told) as caught:
        unpack_dataset(parcel.pickle, parcel.buffers)
    for remedy in ("PYTHONPATH of the data workers", "__main__", "register_pickle_by_value"):
        assert remedy in str(caught.value)
    error = unpack_error(pack_error(caught.value, "a worker"))
    assert type(error) is kind
    assert str(error) == str(caught.value)
    if kind is ModuleNotFoundError:
        assert error.name == "not_there"


def test_the_digest_covers_buffers():
    def digest(array):
        return pack_dataset(Dataset.from_tensor_slices(array).node).digest()

    zeros, one = np.zeros(50_000), np.zeros(50_000)
    assert digest(zeros) == digest(zeros.copy())
    one[-1] = 1
    assert digest(zeros) != digest(one)
