"""Pickles of whom one does not trust."""

import collections
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.group.restricted import load_data


class Calls:
    """Pickles as the call of a function, and perhaps a state."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
    np.arange(20)[::3],
    np.arange(3, dtype=">i4"),
    np.array(7.5),
    np.empty((0, 3), np.float32),
    np.array(["a", "bcd"]),
    np.array([b"xy"]),
    np.array([True, False]),
    np.array([1 + 2j]),
    np.array(["2026-01-01", "NaT"], "M8[D]"),
    np.array([5], "m8[25us]"),
    np.arange(4).astype(ml_dtypes.bfloat16),
    np.arange(4).astype(ml_dtypes.float8_e4m3fn),
]


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_arrays(array, protocol):
    data = pickle.dumps({"a": [array, array], "dtype": array.dtype}, protocol)
    built, plain = load_data(data), pickle.loads(data)
    for got, expected in zip(built["a"], plain["a"], strict=True):
        assert type(got) is np.ndarray
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.strides == expected.strides
        assert got.tobytes() == expected.tobytes()
    assert built["dtype"] == array.dtype


def test_byte_orders_of_one_kind_do_not_mix():
    arrays = [np.arange(3, dtype=order + "f8") for order in "<><"]
    for got, array in zip(load_data(pickle.dumps(arrays, 5)), arrays, strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    "value",
    [None, 1 << 100, "text", b"x" * 1000, bytearray(b"ab"), 1j, range(3), {1, 2}, frozenset("a"),
     slice(1, 2), (1, [2.5, {"k": ()}]), collections.OrderedDict(a=1), np.float32(2.5),
     np.int8(-3), np.datetime64("2026-01-01")],
    ids=repr,
)  # fmt: skip
def test_data(value):
    got = load_data(pickle.dumps(value, 5))
    assert type(got) is type(value)
    assert got == value


OBJECTS = np.dtype("O")
FIELDS = (3, "|", None, ("a",), {"a": (OBJECTS, 0)}, 8, 1, 0)
REFUSED = {
    "a call": Calls(print, ("x",)),
    "a class": collections.Counter("ab"),
    "an exception": ValueError("x"),
    "objects": np.array([None, 1], object),
    "records": np.zeros(2, "i4,f8"),
    "memory of another": Calls(np.ndarray, ((1,), np.dtype("f8"), b"12345678")),
    "a dtype with hidden objects": Calls(np.dtype, ("V8", False, True), FIELDS),
    "fields of a number": Calls(
        np.dtype, ("f8",), (3, "<", None, ("a",), {"a": (np.dtype("f8"), 1 << 28)}, 8, 1, 0)
    ),
    "a subarray": Calls(
        np.dtype, ("f8",), (3, "<", (np.dtype("f8"), (1 << 26,)), None, None, 8, 1, 0)
    ),
    "a list of fields": Calls(np.dtype, ([("a", "O")],)),
    "void": Calls(np.dtype, ("V8",)),
    "a list for memory": Calls(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"),
        (1, (10,), np.dtype("f8"), False, [1] * 3),
    ),
    "too little memory": Calls(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"),
        (1, (10,), np.dtype("f8"), False, b"12345678"),
    ),
    "a negative length": Calls(
        np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"),
        (1, (-1, -1), np.dtype("f8"), False, b"12345678"),
    ),
    "a huge bytearray": Calls(bytearray, (1 << 50,)),
    "a short number": Calls(np._core.multiarray.scalar, (np.dtype("f8"), b"1234")),
    "another class": np.ma.zeros(2),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    with pytest.raises(pickle.UnpicklingError):
        load_data(pickle.dumps(REFUSED[name], 5))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 300), st.integers(1, 255))
def test_bytes_that_are_no_pickle(noise, place, change):
    """An error of pickle's, or data; nothing else is raised, and nothing runs."""
    whole = bytearray(pickle.dumps([np.arange(3.0), {"a": "b"}, np.dtype("i4")], 5))
    whole[place % len(whole)] ^= change
    for data in (noise, b"\x80\x05" + noise, bytes(whole)):
        lengths = [struct.unpack_from("<I", data, at)[0] for at in range(max(len(data) - 3, 0))]
        if max(lengths, default=0) > 1 << 24 and place % 7:
            continue  # most of them ask for much memory
        try:
            load_data(data)
        except (pickle.UnpicklingError, MemoryError):
            continue
