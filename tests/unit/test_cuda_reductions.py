"""Kernels that reduce the arrays of several ranks to one array."""

import ctypes
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest

from mpidist.gpu import DeviceArray, kernels
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
HALVES = [np.dtype("f2"), BF16]
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
    """Return a device array with the data, of any dtype, and the array that owns its memory."""
    if data.dtype == BF16:
        array = xp.asarray(data.view(np.uint16))
        taken = DeviceArray(array)
        taken.dtype = BF16
        return taken, array
    array = xp.asarray(data)
    return DeviceArray(array), array


def expected(parts, op):
    """Reduce in order of rank, in the dtype itself, or in float32 for half precision."""
    dtype = parts[0].dtype
    if dtype.kind == "c":  # as pairs of real numbers
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
    """Check that the values are equal: a compiler can fuse no operations of these kernels."""
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


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_there_and_back(xp, dtype):
    data = values(dtype, 1)
    taken, array = on_device(xp, data)
    wide = widened(as_numbers(taken.packed(), taken.dtype), dtype)
    check(xp.asnumpy(wide), data.astype("f4"))
    wide *= 3
    divided(wide, as_numbers(taken.packed(), taken.dtype), dtype, 7)
    check(xp.asnumpy(array), (data.astype("f4") * 3 / np.float32(7)).astype(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_there_and_back(xp, dtype):
    data = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    taken, array = on_device(xp, data)
    bits = as_numbers(taken.packed(), taken.dtype)
    divided(widened(bits, dtype), bits, dtype, 1)
    got = xp.asnumpy(array).view(dtype)
    np.testing.assert_array_equal(got.astype("f4"), data.astype("f4"))
    assert np.isnan(got).any()


def hard_to_round(dtype):
    """Return the midpoints of adjacent halves, their float32 neighbors, and random numbers."""
    single = np.float32
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(single)
    halves = halves[np.isfinite(halves)]
    with np.errstate(over="ignore"):
        between = (halves[1:] + halves[:-1]) / single(2)
        near = [np.nextafter(between, single(sign)) for sign in (np.inf, -np.inf)]
    random_bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, np.uint32).view(single)
    return np.concatenate([between, *near, random_bits])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_numbers_are_rounded_to_halves_as_numpy_rounds_them(xp, dtype):
    numbers = hard_to_round(dtype)
    numbers = numbers[~(abs(numbers) < np.finfo("f4").tiny)]  # subnormal numbers count as zero
    taken, array = on_device(xp, np.zeros(len(numbers), dtype))
    divided(xp.asarray(numbers), as_numbers(taken.packed(), taken.dtype), dtype, 1)
    with np.errstate(all="ignore"):
        expected = numbers.astype(dtype).astype("f4")
    np.testing.assert_array_equal(xp.asnumpy(array).view(dtype).astype("f4"), expected)


ON_HOST = """
#define __device__
{text}
extern "C" void widen(long long size, const Bits* from, float* to) {{
    for (long long at = 0; at < size; at++) to[at] = of_bfloat16(from[at]);
}}
extern "C" void narrow(long long size, const float* from, Bits* to) {{
    for (long long at = 0; at < size; at++) to[at] = to_bfloat16(from[at]);
}}
"""


def test_the_source_text_for_bfloat16_rounds_as_numpy(tmp_path):
    """The text is compiled for the host, because the stand-in does not read it."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++ or g++) is here")
    source, made = tmp_path / "text.cpp", tmp_path / "text.so"
    source.write_text(ON_HOST.format(text=kernels._BFLOAT16_TEXT))
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", made], check=True)
    library = ctypes.CDLL(str(made))

    def run(name, given, dtype):
        result = np.empty(len(given), dtype)
        places = (ctypes.c_void_p(one.ctypes.data) for one in (given, result))
        getattr(library, name)(ctypes.c_longlong(len(given)), *places)
        return result

    halves, numbers = np.arange(1 << 16, dtype=np.uint16), hard_to_round(BF16)
    wide = run("widen", halves, "f4")
    np.testing.assert_array_equal(wide, halves.view(BF16).astype("f4"))
    narrow = run("narrow", np.concatenate([wide, numbers]), "u2").view(BF16)
    with np.errstate(all="ignore"):
        expected = np.concatenate([wide, numbers.astype(BF16).astype("f4")])
    np.testing.assert_array_equal(narrow.astype("f4"), expected)


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
