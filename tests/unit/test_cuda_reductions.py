"""The kernels that make one array of those of several ranks."""

import ml_dtypes
import numpy as np
import pytest

from mpidist.gpu import DeviceArray
from mpidist.gpu.kernels import (
    MOST_ARRAYS,
    as_numbers,
    can_reduce,
    combine,
    divided,
    is_half,
    numbers_at,
    widened,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(char) for char in "?bhilBHILefdFD"] + [BF16]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]


def values(dtype, seed, size=1000):
    generator = np.random.default_rng(seed)
    if dtype.kind == "b":
        return generator.integers(0, 2, size).astype(dtype)
    if dtype.kind in "iu":
        return generator.integers(0, 100, size).astype(dtype)
    reals = generator.standard_normal(size)
    if dtype.kind == "c":
        reals = reals + 1j * generator.standard_normal(size)
    return reals.astype(dtype)


def on_device(xp, data):
    """An array of any dtype there, as the library sees it; and what keeps its memory."""
    if data.dtype == BF16:
        array = xp.asarray(data.view(np.uint16))
        taken = DeviceArray(array)
        taken.dtype = BF16
        return taken, array
    array = xp.asarray(data)
    return DeviceArray(array), array


def expected(parts, op):
    """In order of rank, in the dtype itself, or in float32 for halves."""
    dtype = parts[0].dtype
    if dtype.kind == "c":  # as pairs
        pairs = [part.view(dtype.char.lower()) for part in parts]
        return expected(pairs, op).view(dtype)
    wide = [part.astype("f4") if is_half(dtype) else part for part in parts]
    if dtype.kind == "b":
        return np.any(wide, 0) if op in ("SUM", "MAX") else np.all(wide, 0)
    functions = {"PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
    with np.errstate(over="ignore"):
        total = wide[0]
        for part in wide[1:]:
            total = functions.get(op, np.add)(total, part)
    if op == "AVG":
        total = total / np.float32(len(parts)) if total.dtype.char in "fF" else total / len(parts)
    return total.astype(dtype)


def check(got, wanted):
    """The same bits: there is nothing that a compiler could fuse."""
    np.testing.assert_array_equal(got.view(wanted.dtype), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_they_are_numpys(xp, dtype, op, count):
    if not can_reduce(dtype, op):
        assert (op == "AVG" and dtype.kind in "biu") or dtype.kind == "c"
        return
    if xp.__name__ == "cupy" and count != 2:
        pytest.skip("each takes a compiler, and they differ in length only")
    data = [values(dtype, seed) for seed in range(count)]
    held = [on_device(xp, one) for one in data]
    parts = [as_numbers(taken.packed(), taken.dtype) for taken, _ in held]
    combine(parts, parts[-1], dtype, op)
    check(xp.asnumpy(held[-1][1]), expected(data, op))
    for (_, array), one in zip(held[:-1], data[:-1], strict=True):
        check(xp.asnumpy(array), one)


def test_as_many_as_there_may_be(xp):
    data = [values(np.dtype("f4"), seed) for seed in range(MOST_ARRAYS)]
    held = [on_device(xp, one) for one in data]
    out = xp.empty(1000, np.dtype("f4"))
    combine(
        [as_numbers(taken.packed(), taken.dtype) for taken, _ in held], out, np.dtype("f4"), "MAX"
    )
    check(xp.asnumpy(out), np.max(data, 0))


@pytest.mark.parametrize("dtype", [np.dtype("f2"), BF16], ids=str)
def test_halves_there_and_back(xp, dtype):
    data = values(dtype, 1)
    taken, array = on_device(xp, data)
    wide = widened(as_numbers(taken.packed(), taken.dtype), dtype)
    check(xp.asnumpy(wide), data.astype("f4"))
    wide *= 3
    divided(wide, as_numbers(taken.packed(), taken.dtype), dtype, 7)
    check(xp.asnumpy(array), (data.astype("f4") * 3 / np.float32(7)).astype(dtype))


def test_every_bfloat16_there_and_back(xp):
    data = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    taken, array = on_device(xp, data)
    divided(
        widened(as_numbers(taken.packed(), taken.dtype), BF16),
        as_numbers(taken.packed(), taken.dtype),
        BF16,
        1,
    )
    got = xp.asnumpy(array).view(BF16)
    np.testing.assert_array_equal(got.astype("f4"), data.astype("f4"))
    assert np.isnan(got).any()


def test_numbers_by_their_address(xp):
    data = values(np.dtype("F"), 1)
    taken, array = on_device(xp, data)
    part = numbers_at(taken.pointer + 80, 160, taken.dtype, 0)
    divided(part, part, taken.dtype, 2)
    data[10:30] /= 2
    check(xp.asnumpy(array), data)


def test_what_they_do_not_do():
    assert not can_reduce(np.dtype("f4"), "PREMUL_SUM")
    assert not can_reduce(np.dtype("i4"), "BXOR")
    assert not can_reduce(np.dtype(">f4"), "SUM")
    assert not can_reduce(np.dtype("D"), "MAX")
    assert not can_reduce(np.dtype(ml_dtypes.float8_e5m2), "SUM")
    assert not can_reduce(np.dtype("g"), "SUM")
