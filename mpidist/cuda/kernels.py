"""Kernels by their text, which CuPy compiles, and keeps on disk."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpidist.cuda.library import cupy
from mpidist.errors import FailedPreconditionError

_THREADS = 256
# Products that are added are rounded first, as NumPy rounds them.
_OPTIONS = ("--fmad=false",)


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
