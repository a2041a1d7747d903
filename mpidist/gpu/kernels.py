"""Kernels, which CuPy compiles and caches on disk: from source text, and reductions of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from mpidist.errors import FailedPreconditionError
from mpidist.gpu.cupy_api import cupy

MOST_ARRAYS = 64
"""Arrays that one kernel can reduce: CUDA limits the size of its parameters."""

_INTEGERS = "bhilqBHILQ"
_FLOATS = "efd"
_SIGNS = {"SUM": "+", "AVG": "+", "PRODUCT": "*"}
_NAMES = {"MIN": "min", "MAX": "max"}
LOGICAL = {"SUM": "MAX", "PRODUCT": "MIN"}
"""The reductions of bools by logic: SUM is "any", PRODUCT is "all"."""

_THREADS = 256
# No fused multiply-add: it rounds once, and NumPy rounds the product and the sum.
_OPTIONS = ("--fmad=false",)

HALVES_TEXT = """
typedef long long Index;
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

static __device__ float of_float16(Bits half) {
    const unsigned sign = (half & 0x8000u) << 16, rest = half & 1023u;
    const unsigned exponent = (half >> 10) & 31u;
    if (exponent == 31u) return as_number(sign | 0x7f800000u | (rest << 13));
    if (exponent) return as_number(sign | ((exponent + 112u) << 23) | (rest << 13));
    const float small = (float)rest * 5.9604644775390625e-8f;  /* 2 to the power of -24 */
    return as_number(sign | as_bits(small));
}

static __device__ Bits to_float16(float number) {
    const unsigned sign = as_bits(number) & 0x80000000u;
    unsigned bits = as_bits(number) ^ sign;
    if (bits >= 0x47800000u) {
        bits = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (bits < 0x38800000u) {  /* the addition rounds at the last digit of a small half */
        bits = as_bits(as_number(bits) + 0.5f) - 0x3f000000u;
    } else {
        bits = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    }
    return (Bits)(bits | (sign >> 16));
}
"""
"""Source text that converts float16 and bfloat16 to float32 and back, rounded as NumPy does.

It needs no headers of CUDA.
"""


class Kernel:
    """A kernel that handles one element in each thread; made by :func:`kernel`.

    Args:
        package: CuPy.
        text: The source in CUDA C++, without headers.
        name: The function. Its first parameter is the number of elements.
    """

    def __init__(self, package: Any, text: str, name: str) -> None:
        self._raw = package.RawKernel(text, name, _OPTIONS)
        self._compiled: set[int] = set()

    def compile(self, device: int) -> None:
        """Compile for the current device, unless that has been done.

        Args:
            device: Index of that device.

        Raises:
            FailedPreconditionError: CuPy cannot compile.
        """
        if device in self._compiled:
            return
        try:
            self._raw.compile()
        except Exception as error:  # CuPy raises errors of many kinds if NVRTC is missing
            raise FailedPreconditionError(
                f"CuPy cannot compile a kernel for GPU {device} ({error!r}): it needs NVRTC of "
                "CUDA, which cupy-cuda12x[ctk] and cupy-cuda13x[ctk] bring"
            ) from error
        self._compiled.add(device)

    def __call__(self, size: int, *args: Any) -> None:
        """Launch the kernel on the current stream of the current device.

        Args:
            size: Number of elements; 0 launches nothing.
            args: The other parameters: NumPy numbers and addresses.

        Raises:
            CUDARuntimeError: CUDA failed.
            CUDADriverError: CUDA failed.
        """
        if size:
            self._raw((-(-size // _THREADS),), (_THREADS,), (size, *args))


def kernel(text: str, name: str) -> Kernel:
    """Return the kernel of a source text; see :class:`Kernel`."""
    return _kernel(cupy(), text, name)


_kernel = cache(Kernel)


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
    preamble = HALVES_TEXT if "bfloat16" in name else ""
    return cupy().ElementwiseKernel(
        inputs, "U out", operation, f"mpidist_{name}_{count}", preamble=preamble
    )
