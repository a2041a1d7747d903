"""Arguments and results of ReduceOp."""

import enum

import ml_dtypes
import numpy as np
import pytest

from mpidist import ReduceOp
from mpidist.buffers.reduce_op import to_reduce, to_reduce_into

HALF = ReduceOp.PREMUL_SUM(0.5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, ">f8"])
def test_premultiplied_in_place(dtype):
    array = np.arange(6).astype(dtype)
    buffer, op, finish = to_reduce(array, HALF, 2)
    assert op is ReduceOp.PREMUL_SUM  # ranks compare its name
    np.testing.assert_array_equal(buffer, np.arange(6) / 2)
    if finish is not None:
        finish()
    np.testing.assert_array_equal(array, np.arange(6) / 2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_premultiplied_in_float32(dtype):
    array = np.full(3, 2, dtype)
    buffer, _, finish = to_reduce(array, ReduceOp.PREMUL_SUM(1 / 3), 2)
    assert buffer.dtype == np.float32
    buffer *= 3
    finish()
    np.testing.assert_array_equal(array, np.full(3, 2, dtype))


def test_an_input_stays_as_it_is():
    source, target = np.ones(4), np.zeros(4)
    buffer, _, _ = to_reduce(source, HALF, 2, write=False)
    send, _, _, _ = to_reduce_into(source, target, HALF, 2)
    np.testing.assert_array_equal(buffer, 0.5)
    np.testing.assert_array_equal(send, 0.5)
    np.testing.assert_array_equal(source, 1)


def test_an_array_of_factors():
    array = np.ones((2, 3), np.float32)
    buffer, _, _ = to_reduce(array, ReduceOp.PREMUL_SUM(np.array([1, 2, 3], np.float32)), 2)
    np.testing.assert_array_equal(buffer, [[1, 2, 3], [1, 2, 3]])


def test_factors_are_for_floating_numbers():
    for array in (np.ones(2, np.int64), np.ones(2, bool)):
        with pytest.raises(TypeError, match="cannot be reduced with PREMUL_SUM"):
            to_reduce(array, HALF, 2)
    with pytest.raises(TypeError, match="SUM takes no factor"):
        ReduceOp.SUM(2.0)
    with pytest.raises(TypeError):
        to_reduce(np.ones(2, np.float32), ReduceOp.PREMUL_SUM(1j), 2)


@pytest.mark.parametrize("op", [ReduceOp.PREMUL_SUM, "premul_sum"])
def test_a_factor_is_needed(op):
    for dtype in (np.float32, np.float16, np.int32):
        with pytest.raises(ValueError, match="needs a factor"):
            to_reduce(np.ones(2, dtype), ReduceOp.of(op), 2)


def test_names():
    assert ReduceOp.of("avg") is ReduceOp.of("MEAN") is ReduceOp.AVG
    assert ReduceOp.of(HALF) is HALF
    assert repr(HALF) == "ReduceOp.PREMUL_SUM(0.5)"
    with pytest.raises(ValueError, match=r"unknown reduction 'sums'.*SUM, AVG"):
        ReduceOp.of("sums")


def test_a_member_of_another_library():
    theirs = enum.Enum("ReduceOp", {"SUM": "SUM"})
    assert ReduceOp.of(theirs.SUM) is ReduceOp.SUM
