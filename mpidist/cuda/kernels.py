"""Kernels by their text, which CuPy compiles, and keeps on disk."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpidist.cuda.library import cupy
from mpidist.errors import FailedPreconditionError

_THREADS = 256
# Products that are added are rounded first, as NumPy rounds them.
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
"""For texts: bits of halves to float and back, rounded as NumPy does, without CUDA's headers."""


class Kernel:
    """A function of CUDA that works on one element a thread; made by :func:`kernel`.

    Args:
        package: CuPy.
        text: In CUDA's C++, without headers.
        name: Of the function, which takes the number of elements first.
    """

    def __init__(self, package: Any, text: str, name: str) -> None:
        self._raw = package.RawKernel(text, name, _OPTIONS)
        self._compiled: set[int] = set()

    def compile(self, number: int) -> None:
        """Local. Have it ready on a device, which is the current one.

        Raises:
            FailedPreconditionError: CuPy cannot compile.
        """
        if number in self._compiled:
            return
        try:
            self._raw.compile()
        except Exception as error:  # of the compiler, or because it cannot be found
            raise FailedPreconditionError(
                f"CuPy cannot compile a kernel for GPU {number} ({error!r}): it needs NVRTC of "
                "CUDA, which cupy-cuda12x[ctk] and cupy-cuda13x[ctk] bring"
            ) from error
        self._compiled.add(number)

    def __call__(self, size: int, *given: Any) -> None:
        """Local. Begin it on the current stream of the current device.

        Args:
            size: How many elements; of none nothing begins.
            given: What follows: numbers of NumPy's types, and addresses.

        Raises:
            CUDARuntimeError: CUDA failed; so does CUDADriverError.
        """
        if size:
            self._raw((-(-size // _THREADS),), (_THREADS,), (size, *given))


def kernel(text: str, name: str) -> Kernel:
    """Local. The kernel of a text; see :class:`Kernel`."""
    return _kernel(cupy(), text, name)


_kernel = cache(Kernel)
