"""Checks for finite gradients, compared with NumPy's check of every element."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategy.client.changes import Change
from strategy.gradients import _PART, not_finite
from strategy.protocol.layout import Layout

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
LARGE = [1e-300, 3.3e38, 3.5e38, 65519.0, 65520.0, 1e200, np.inf, -np.inf, np.nan, -0.0, 0.0, -1.0]


def names(data, dtype):
    remote = SimpleNamespace(origin=SimpleNamespace(variable="v"), layout=Layout(data.shape, dtype))
    return not_finite([Change((remote,), 0, data)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*DTYPES, np.longdouble, ml_dtypes.float8_e4m3fn], ids=str)
@given(st.lists(st.sampled_from(LARGE), max_size=8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_as_numpy_says(dtype, kind, values, strided):
    with np.errstate(all="ignore"):
        data = np.array(values).astype(kind)
        expected = np.isfinite(data.astype(dtype)).all() and np.isfinite(data).all()
        data = np.repeat(data, 2)[::2] if strided else data
    assert names(data, dtype) == ([] if expected else ["v"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, _PART - 1, _PART, 3 * _PART + 2, 3 * _PART + 3, -2, -1, None])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("others", [1, 0])
@pytest.mark.parametrize("size", [6 * _PART + 7, 6 * _PART + 8])
def test_wherever_it_is(dtype, place, bad, others, size):
    data = np.full(size, others, dtype)
    if place is not None:
        data[place] = bad
    assert names(data, dtype) == ([] if place is None else ["v"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares_that_are_too_large(dtype):
    for size in (5, 6 * _PART + 7):
        assert names(np.full(size, np.finfo(dtype).max, dtype), dtype) == []


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.uint8, np.int64])
def test_integers_are_finite(dtype):
    for variable in DTYPES:
        assert names(np.ones(3, dtype), variable) == []


def test_integers_that_are_too_large_for_halves():
    data = np.array([1, -65520])
    assert [names(data, dtype) for dtype in DTYPES] == [["v"], [], [], []]
    assert names(np.array([65519, -65519]), np.float16) == []
