"""Kernels from source text. CuPy compiles them and caches them on disk."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpidist.errors import FailedPreconditionError
from mpidist.gpu.cupy_api import cupy

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
