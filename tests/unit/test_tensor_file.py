"""Files of arrays: the library safetensors reads the same."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from safetensors.numpy import load_file

from mpidist.checkpoints.tensor_file import (
    STORED_NAMES,
    read_header,
    read_tensor,
    write_tensors,
)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_safetensors_reads_the_arrays(tmp_path_factory, data):
    tensors = {}
    for name in data.draw(st.sets(st.text(min_size=1, max_size=5), max_size=4)):
        dtype = dtype_of(data.draw(st.sampled_from(sorted(STORED_NAMES))))
        shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
        count = int(np.prod(shape)) * dtype.itemsize
        values = data.draw(st.binary(min_size=count, max_size=count))
        if dtype.kind == "b":
            values = bytes(value & 1 for value in values)
        array = np.frombuffer(values, dtype).reshape(shape)
        tensors[name] = array.T if data.draw(st.booleans()) else array
    path = str(tmp_path_factory.getbasetemp() / "file.safetensors")
    write_tensors(path, tensors, {"about": "é"})
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"about": "é"}
        assert set(file.keys()) == tensors.keys()
        by_library = {
            name: file.get_tensor(name)
            for name, array in tensors.items()
            if not array.dtype.name.startswith("float8")  # its NumPy interface lacks them
        }
    stored, metadata = read_header(path)
    assert metadata == {"about": "é"}
    by_us = {name: read_tensor(path, one) for name, one in stored.items()}
    assert by_us.keys() == tensors.keys()
    for found in by_us, by_library:
        for name, array in found.items():
            assert array.dtype == tensors[name].dtype
            assert array.shape == tensors[name].shape
            assert array.tobytes() == tensors[name].tobytes()


def test_big_endian_arrays_and_other_dtypes(tmp_path):
    path = str(tmp_path / "file")
    write_tensors(path, {"a": np.arange(3, dtype=">i4")}, {})
    assert load_file(path)["a"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="cannot hold an array of complex128"):
        write_tensors(path, {"a": np.zeros(1, "complex128")}, {})
