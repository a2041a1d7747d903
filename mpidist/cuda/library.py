"""CuPy, which is imported here only, and when the first array on a device comes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpidist.errors import DistBackendError, FailedPreconditionError, ResourceExhaustedError

_INSTALL = (
    "pip install 'cupy-cuda13x[ctk]' or 'cupy-cuda12x[ctk]', which the extras cuda13 and cuda12 of "
    "mpidist bring, as the driver needs (nvidia-smi shows its version of CUDA)"
)
_DRIVERS = ("/proc/driver/nvidia/gpus", "/dev/dxg")  # the latter within Windows
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, and CUDA_ERROR_OUT_OF_MEMORY
_KNOWN = "?bhilqBHILQefdFD"  # CuPy itself takes more where it is given memory, and computes wrongly
_BFLOAT16_SINCE = 14


def cupy() -> Any:
    """Local. The package.

    Raises:
        FailedPreconditionError: It is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # broken installations raise whatever they come upon
        raise FailedPreconditionError(
            f"GPUs, and arrays there, need CuPy, which cannot be imported ({error!r}): {_INSTALL}"
        ) from error


def device_count() -> int:
    """Local. How many GPUs CuPy can use here.

    Raises:
        FailedPreconditionError: CuPy cannot be imported, or can use none; says why.
    """
    runtime = cupy().cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise FailedPreconditionError(
            f"CuPy is installed, but can use no GPU here ({error}): look at nvidia-smi, at "
            "CUDA_VISIBLE_DEVICES, and at whether this CuPy is of the driver's version of CUDA "
            "(cupy-cuda12x, cupy-cuda13x)"
        ) from error
    if not count:
        raise FailedPreconditionError(
            "CuPy is installed, but there is no GPU here: look at nvidia-smi, and at "
            "CUDA_VISIBLE_DEVICES"
        )
    return count


def may_have_gpus() -> bool:
    """Local. Whether CuPy is installed, and a driver there; without importing anything."""
    there = any(map(os.path.exists, _DRIVERS)) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    return there and importlib.util.find_spec("cupy") is not None


def bus_id(number: int) -> str:
    """Local. What tells a GPU from the others of its node, whatever number it has here."""
    return str(cupy().cuda.runtime.deviceGetPCIBusId(number))


def has_dtype(dtype: np.dtype[Any]) -> bool:
    """Local. Whether CuPy has arrays of a dtype, in whichever byte order."""
    if dtype.name == "bfloat16":
        return int(str(cupy().__version__).partition(".")[0]) >= _BFLOAT16_SINCE
    return dtype.char in _KNOWN


def check_dtype(dtype: np.dtype[Any], whose: str = "an array") -> None:
    """Local. TypeError unless CuPy has arrays of a dtype.

    Args:
        dtype: Which.
        whose: For the message.
    """
    if not has_dtype(dtype):
        since = f" before version {_BFLOAT16_SINCE}" if dtype.name == "bfloat16" else ""
        raise TypeError(
            f"{whose} of {dtype} cannot lie on a GPU: CuPy has no such dtype{since}; of a variable "
            "numpy() gives the value on the host"
        )


@contextmanager
def on_device(number: int, doing: str) -> Iterator[Any]:
    """Local. Make a device current; errors of CUDA within say which it was, and what was done.

    Args:
        number: Of the device.
        doing: For messages: ``"copying 16 bytes from it"``.

    Yields:
        The package.

    Raises:
        ResourceExhaustedError: There is no memory.
        DistBackendError: Anything else of CUDA.
    """
    package = cupy()
    with explained(f"GPU {number}", doing):
        # To make a device current again gives it a context, which takes memory there.
        if package.cuda.runtime.getDevice() == number:
            yield package
            return
        with package.cuda.Device(number):
            yield package


@contextmanager
def explained(where: str, doing: str) -> Iterator[None]:
    """Local. See :func:`on_device`, for what is done on no device in particular."""
    try:
        yield
    except errors_of_cuda() as error:
        if is_out_of_memory(error):
            raise ResourceExhaustedError(
                f"{where} has not enough memory for {doing}: {error}"
            ) from error
        raise DistBackendError(
            f"{doing} failed on {where}: {error}. CUDA tells late: an earlier kernel of this "
            "process may be the cause (CUDA_LAUNCH_BLOCKING=1 shows which)"
        ) from error


def make_current(number: int) -> None:
    """Local. Make a device the current one of this thread.

    It stays so: to go back to another gives that one a context, which takes memory there.
    """
    if cupy().cuda.runtime.getDevice() != number:
        cupy().cuda.Device(number).use()


def errors_of_cuda() -> tuple[type[Exception], ...]:
    """Local. What CuPy raises where CUDA fails, or memory is short."""
    cuda = cupy().cuda
    return (
        cuda.runtime.CUDARuntimeError,
        cuda.driver.CUDADriverError,
        cuda.compiler.CompileException,
        MemoryError,  # CuPy's own is one
    )


def is_out_of_memory(error: Exception) -> bool:
    """Local. Whether an error of CUDA, or of Python, is the lack of memory."""
    return isinstance(error, MemoryError) or getattr(error, "status", 0) == _OUT_OF_MEMORY
