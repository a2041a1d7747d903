"""Kernels for reductions and conversions of arrays, which CuPy compiles and caches on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from mpidist.gpu.cupy_api import cupy

MOST_ARRAYS = 64
"""Arrays that one kernel can reduce: CUDA limits the size of its parameters."""

_INTEGERS = "bhilqBHILQ"
_FLOATS = "efd"
_SIGNS = {"SUM": "+", "AVG": "+", "PRODUCT": "*"}
_NAMES = {"MIN": "min", "MAX": "max"}
LOGICAL = {"SUM": "MAX", "PRODUCT": "MIN"}
"""The reductions of bools by logic: SUM is "any", PRODUCT is "all"."""

_BFLOAT16_TEXT = """
typedef unsigned short Bits;

union Word { unsigned bits; float number; };

static __device__ float as_number(unsigned bits) {
    Word word;
    word.bits = bits;
    return word.number;
}

static __device__ unsigned as_bits(float number) {
    Word word;
    word.number = number;
    return word.bits;
}

static __device__ float of_bfloat16(Bits half) { return as_number((unsigned)half << 16); }

static __device__ Bits to_bfloat16(float number) {
    const unsigned bits = as_bits(number);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (Bits)((bits >> 16) | 0x40u);
    return (Bits)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
"""
"""Source text that converts bfloat16 to float32 and back, rounded as NumPy does.

It needs no headers of CUDA.
"""


def can_reduce(dtype: np.dtype[Any], op: str) -> bool:
    """Return whether :func:`combine` reduces arrays of a dtype.

    Args:
        dtype: The dtype of the elements.
        op: Name of a :class:`mpidist.ReduceOp`.
    """
    if not dtype.isnative or op not in (*_SIGNS, *_NAMES):
        return False
    if dtype.char in _FLOATS or is_bfloat16(dtype):
        return True
    if dtype.isbuiltin != 1:  # ml_dtypes uses the type characters of other dtypes
        return False
    if dtype.char in "FD":
        return op in ("SUM", "AVG")
    return op != "AVG" and (dtype.char == "?" or dtype.char in _INTEGERS)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is the bfloat16 of ml_dtypes."""
    return bool(dtype.name == "bfloat16")


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is reduced in float32."""
    return dtype.char == "e" or is_bfloat16(dtype)


def as_numbers(bits: Any, dtype: np.dtype[Any]) -> Any:
    """Return a flat CuPy array as kernels take it, over the same memory.

    Args:
        bits: Unsigned integers, see :meth:`mpidist.gpu.DeviceArray.packed`.
        dtype: The dtype of the elements.
    """
    return bits.view(stored_as(dtype))


def numbers_at(pointer: int, nbytes: int, dtype: np.dtype[Any], device: int) -> Any:
    """Return memory as a flat CuPy array that kernels take; the caller keeps the memory.

    Args:
        pointer: Address in this process; the memory may belong to another process.
        nbytes: Size of the memory.
        dtype: The dtype of the elements.
        device: Index of the GPU that works with it, wherever it lies.
    """
    cuda, dtype = cupy().cuda, stored_as(dtype)
    memory = cuda.UnownedMemory(pointer, nbytes, None, device)
    shape = (nbytes // dtype.itemsize,)
    return cupy().ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))


def stored_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the numbers that kernels read for elements of a dtype.

    Complex numbers are pairs of floats, bools are uint8, and bfloat16 are bits.
    """
    if dtype.char in "FD":
        return np.dtype(dtype.char.lower())
    if dtype.char == "?" or is_bfloat16(dtype):
        return np.dtype(f"u{dtype.itemsize}")
    return dtype


def combine(parts: Sequence[Any], out: Any, dtype: np.dtype[Any], op: str) -> None:
    """Reduce arrays of the current device in order, in one kernel on the current stream.

    Args:
        parts: Flat arrays of numbers, see :func:`as_numbers`; at most ``MOST_ARRAYS``.
        out: Receives the result; one of the parts, or an array that overlaps none of them.
        dtype: The dtype of the elements.
        op: See :func:`can_reduce`.

    Raises:
        CompileException: The kernel cannot be compiled.
    """
    names = [_element(number, dtype) for number in range(len(parts))]
    if dtype.char == "?":
        op = LOGICAL.get(op, op)
    if op in _SIGNS:
        value = f" {_SIGNS[op]} ".join(names)
    else:
        value = names[0]
        for name in names[1:]:
            value = f"{_NAMES[op]}({value}, {name})"
    if op == "AVG":
        value = f"({value}) / {len(parts)}"
    kernel = _elementwise(len(parts), _stored(value, dtype), f"{op.lower()}_{dtype.name}")
    kernel(*parts, out)


def widened(part: Any, dtype: np.dtype[Any]) -> Any:
    """Return float16 or bfloat16 numbers in a new array of float32."""
    out = cupy().empty(part.shape, np.dtype("f4"))
    _elementwise(1, f"out = {_element(0, dtype)}", f"widen_{dtype.name}")(part, out)
    return out


def divided(part: Any, out: Any, dtype: np.dtype[Any], count: int) -> None:
    """Divide numbers, and convert float32 back to float16 or bfloat16.

    Args:
        part: Numbers of the dtype; float32 for float16 and bfloat16.
        out: Numbers of the dtype; may be the part.
        dtype: The dtype of the elements.
        count: The divisor; 1 only converts.
    """
    value = f"a0 / {count}" if count > 1 else "a0"
    kernel = _elementwise(1, _stored(value, dtype), f"divide_{count}_{dtype.name}")
    kernel(part, out)


def _element(number: int, dtype: np.dtype[Any]) -> str:
    form = "of_bfloat16(a{})" if is_bfloat16(dtype) else "float(a{})" if is_half(dtype) else "a{}"
    return form.format(number)


def _stored(value: str, dtype: np.dtype[Any]) -> str:
    return f"out = to_bfloat16({value})" if is_bfloat16(dtype) else f"out = {value}"


@cache
def _elementwise(count: int, operation: str, name: str) -> Any:
    """Return a kernel. CuPy compiles it at its first call and caches it on disk."""
    inputs = ", ".join(f"T a{number}" for number in range(count))
    preamble = _BFLOAT16_TEXT if "bfloat16" in name else ""
    return cupy().ElementwiseKernel(
        inputs, "U out", operation, f"mpidist_{name}_{count}", preamble=preamble
    )
