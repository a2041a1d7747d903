"""CuPy: its import, its devices and dtypes, and the errors that it raises.

CuPy is imported when the first array on a GPU arrives.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from mpidist.errors import DistBackendError, Error, FailedPreconditionError, ResourceExhaustedError
from mpidist.mpi import this_rank

_INSTALL = (
    "pip install 'cupy-cuda13x[ctk]' or 'cupy-cuda12x[ctk]', which the extras cuda13 and cuda12 of "
    "mpidist bring, as the driver needs (nvidia-smi shows its version of CUDA)"
)
# CuPy takes other dtypes over given memory, too, and computes wrong values with them.
_KNOWN = "?bhilqBHILQefdFD"
_BFLOAT16_SINCE = 14
# One of these exists if a driver has found a GPU: on Linux, under Windows, on Jetson boards.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, and CUDA_ERROR_OUT_OF_MEMORY
_EXCLUSIVE = 46  # cudaErrorDevicesUnavailable
# After these errors every later call fails, too. CUDA's manual tells the process to end.
_LOST = frozenset(
    (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999)
)
_BAD_MEMORY = frozenset((1, 17, 101, 400))
_REMEDIES = {
    3: "CUDA cannot start in this process: look at nvidia-smi and dmesg; if this process was "
    "forked from one that had used CUDA, start it with the 'spawn' or 'forkserver' method",
    35: "there is no driver of NVIDIA here, or it is older than this CuPy needs (cupy-cuda12x, "
    "cupy-cuda13x): nvidia-smi shows its version of CUDA",
    _EXCLUSIVE: "the device is exclusive to another process, or prohibited (nvidia-smi -q -d "
    "COMPUTE shows the mode): give each process of the host a device of its own, set the mode to "
    "default, or start MPS",
    100: "there is no device: look at nvidia-smi, and at CUDA_VISIBLE_DEVICES",
    802: "the host is not ready for CUDA: check that its daemons run (nvidia-fabricmanager)",
    803: "the parts of the driver have different versions: restart the host",
}
_BAD_MEMORY_REMEDY = (
    "perhaps the memory of an array was freed, or the device was reset, while the array was still "
    "in use: keep the array, or the owner of its memory, until the operation has ended"
)
_LOST_REMEDY = (
    "The device is lost to this process: every later call fails, and the process must end. A "
    "kernel of this process may be the cause (CUDA_LAUNCH_BLOCKING=1 shows which), or the device "
    "itself (see nvidia-smi and dmesg)"
)
_LATE_REPORT = (
    "CUDA reports errors late: an earlier kernel of this process may be the cause "
    "(CUDA_LAUNCH_BLOCKING=1 shows which)"
)

_first_user: list[int] = []  # the process that used CUDA first
_checked: list[Any] = []  # CuPy, once this process may use it; kept until a fork
os.register_at_fork(after_in_child=_checked.clear)


def cupy() -> Any:
    """Return CuPy, for use with a device.

    Raises:
        FailedPreconditionError: CuPy is not installed or cannot be imported, or this process was
            forked from one that had used CUDA.
    """
    package = sys.modules.get("cupy")  # 10 times as fast as importlib.import_module
    return package if package in _checked else _checked_import()


def _checked_import() -> Any:
    package = _import()
    if not _first_user:
        _first_user.append(os.getpid())
    elif _first_user[0] != os.getpid():
        raise FailedPreconditionError(
            f"process {os.getpid()} was forked from process {_first_user[0]}, which had used GPUs, "
            "and cannot use them: CUDA does not survive a fork. Start processes with the 'spawn' "
            "or 'forkserver' method, or use GPUs only in the children, and not before they start"
        )
    _checked.append(package)
    return package


def _import() -> Any:
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # broken installations raise errors of any kind
        raise FailedPreconditionError(
            f"GPUs, and arrays there, need CuPy, which cannot be imported ({error!r}): {_INSTALL}"
        ) from error


def why_no_gpu(env: Mapping[str, str]) -> str:
    """Return the reason why this process can use no GPU; "" if it may. CUDA is not asked.

    Args:
        env: Usually ``os.environ``.
    """
    if find_spec("cupy") is None:
        return "there is no CuPy"
    if env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    return "" if any(map(os.path.exists, _DRIVER_FILES)) else "there is no GPU"


def device_count() -> int:
    """Return the number of GPUs that CuPy can use in this process, at least 1.

    Raises:
        FailedPreconditionError: CuPy cannot be imported, or can use no GPU.
    """
    runtime = cupy().cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise FailedPreconditionError(
            f"CuPy is installed, but {with_rank('this process')} can use no GPU ({error}): look at "
            "nvidia-smi, at CUDA_VISIBLE_DEVICES, and at whether this CuPy is of the driver's "
            "version of CUDA (cupy-cuda12x, cupy-cuda13x)"
        ) from error
    if not count:
        raise FailedPreconditionError(
            f"CuPy is installed, but {with_rank('this process')} has no GPU: look at nvidia-smi, "
            "and at CUDA_VISIBLE_DEVICES"
        )
    return count


def bus_id(device: int) -> str:
    """Return the PCI bus id of a GPU, which is the same in all processes of its node."""
    return str(cupy().cuda.runtime.deviceGetPCIBusId(device))


@lru_cache(256)  # NumPy computes the name of a dtype in 1 us
def has_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether CuPy has arrays of a dtype, in any byte order."""
    if dtype.name == "bfloat16":
        return int(str(_import().__version__).partition(".")[0]) >= _BFLOAT16_SINCE
    return dtype.char in _KNOWN


def check_dtype(dtype: np.dtype[Any], owner: str = "an array") -> None:
    """Raise TypeError unless CuPy has arrays of a dtype.

    Args:
        dtype: The dtype.
        owner: The array, for the message: ``"variable 'w'"``.
    """
    if not has_dtype(dtype):
        since = f" before version {_BFLOAT16_SINCE}" if dtype.name == "bfloat16" else ""
        raise TypeError(
            f"{owner} of {dtype} cannot lie on a GPU: CuPy has no such dtype{since}; of a variable "
            "numpy() gives the value on the host"
        )


def cuda_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that CuPy raises if CUDA fails or memory is short."""
    cuda = _import().cuda
    return (
        cuda.runtime.CUDARuntimeError,
        cuda.driver.CUDADriverError,
        cuda.compiler.CompileException,
        MemoryError,  # the base of CuPy's own
    )


class on_device:
    """Context manager that makes a device current, raises errors of mpidist, and yields CuPy.

    Args:
        device: Device index; None keeps the current device.
        operation: The operation, for messages, with ``%s`` for each of the ``args``:
            ``"copying %s to the host"``. The text is made only if CUDA fails, as in logging.
        args: Objects to format.

    Raises:
        ResourceExhaustedError: The device or the host lacks memory.
        FailedPreconditionError: CUDA cannot start in this process.
        DistBackendError: CUDA failed in another way.
    """

    # A class, because a generator takes twice as long.
    def __init__(self, device: int | None, operation: str, *args: object) -> None:
        self._device = device
        self._operation = operation
        self._args = args
        self._context: Any = None

    def __enter__(self) -> Any:
        package = cupy()
        device = self._device
        try:
            # Making the current device current again would create a context, which takes memory.
            if device is not None and package.cuda.runtime.getDevice() != device:
                self._context = package.cuda.Device(device)
                self._context.__enter__()
        except Exception as error:
            self._map(error)
            raise
        return package

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._context is not None:
            try:
                self._context.__exit__(kind, error, traceback)
            except Exception as failure:
                self._map(failure)
                raise
        if error is not None:
            self._map(error)

    def _map(self, error: BaseException) -> None:
        # Errors of mpidist name device and remedy already.
        if isinstance(error, Error) or not isinstance(error, cuda_errors()):
            return
        where = "its GPU" if self._device is None else f"GPU {self._device}"
        operation = self._operation % self._args if self._args else self._operation
        raise mapped_error(error, where, operation) from error


def make_current(device: int) -> None:
    """Make a device the current one of this thread, for good.

    A return to another device would create a context there, which takes memory.
    """
    package = cupy()
    try:
        if package.cuda.runtime.getDevice() != device:
            package.cuda.Device(device).use()
    except cuda_errors() as error:
        raise mapped_error(error, f"GPU {device}", "making it the current device") from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory of a device or of the host is short."""
    return isinstance(error, MemoryError) or _status(error) == _OUT_OF_MEMORY


def is_final(error: Exception) -> bool:
    """Return whether this process cannot use a device after an error."""
    return _status(error) in _LOST or _status(error) in _REMEDIES


def mapped_error(error: BaseException, where: str, operation: str) -> Error:
    """Return the error of mpidist for an error of CUDA.

    Args:
        error: One of :func:`cuda_errors`.
        where: The device: ``"GPU 0"``.
        operation: The operation: ``"copying 16 bytes from it"``.
    """
    where, status = with_rank(where), _status(error)
    if isinstance(error, MemoryError) or status == _OUT_OF_MEMORY:
        if type(error) is MemoryError:  # of Python; CuPy raises a subclass
            where = with_rank("the host")
        return ResourceExhaustedError(f"{where} has not enough memory for {operation}: {error}")
    text = f"{operation} failed on {where}: {error}"
    if status in _LOST:
        return DistBackendError(f"{text}. {_LOST_REMEDY}")
    if status in _BAD_MEMORY:
        return DistBackendError(f"{text}: {_BAD_MEMORY_REMEDY}. {_LATE_REPORT}")
    if status in _REMEDIES:
        kind = FailedPreconditionError if status != _EXCLUSIVE else DistBackendError
        return kind(f"{text}: {_REMEDIES[status]}")
    return DistBackendError(f"{text}. {_LATE_REPORT}")


def with_rank(where: str) -> str:
    """Return a device or host with the rank of this process, if it has one."""
    rank = this_rank()
    return f"{where} of {rank}" if rank else where


def _status(error: BaseException) -> int:
    return int(getattr(error, "status", 0) or 0)
