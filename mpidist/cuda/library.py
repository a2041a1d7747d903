"""CuPy, which is imported here only, and when the first array on a device comes."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from mpidist.cuda.failures import explanation, place
from mpidist.errors import Error, FailedPreconditionError

_INSTALL = (
    "pip install 'cupy-cuda13x[ctk]' or 'cupy-cuda12x[ctk]', which the extras cuda13 and cuda12 of "
    "mpidist bring, as the driver needs (nvidia-smi shows its version of CUDA)"
)
_KNOWN = "?bhilqBHILQefdFD"  # CuPy itself takes more where it is given memory, and computes wrongly
_BFLOAT16_SINCE = 14
# One of these exists if a driver has found a GPU: on Linux, under Windows, on Jetson boards.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")
_user: list[int] = []  # the process that was the first to use CUDA


def cupy() -> Any:
    """Local. The package, to be used with a device.

    Raises:
        FailedPreconditionError: It is not installed, or cannot be imported; or this process was
            forked from one that had used CUDA, which works only there.
    """
    package = _imported()
    if not _user:
        _user.append(os.getpid())
    elif _user[0] != os.getpid():
        raise FailedPreconditionError(
            f"process {os.getpid()} was forked from process {_user[0]}, which had used GPUs, and "
            "cannot use them: CUDA does not survive a fork. Start processes with the 'spawn' or "
            "'forkserver' method, or use GPUs only in the children, and not before they start"
        )
    return package


def _imported() -> Any:
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # broken installations raise whatever they come upon
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
    """Local. How many GPUs CuPy can use here.

    Raises:
        FailedPreconditionError: CuPy cannot be imported, or can use none; says why.
    """
    runtime = cupy().cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise FailedPreconditionError(
            f"CuPy is installed, but {place('this process')} can use no GPU ({error}): look at "
            "nvidia-smi, at CUDA_VISIBLE_DEVICES, and at whether this CuPy is of the driver's "
            "version of CUDA (cupy-cuda12x, cupy-cuda13x)"
        ) from error
    if not count:
        raise FailedPreconditionError(
            f"CuPy is installed, but {place('this process')} has no GPU: look at nvidia-smi, and "
            "at CUDA_VISIBLE_DEVICES"
        )
    return count


def bus_id(number: int) -> str:
    """Local. What tells a GPU from the others of its node, whatever number it has here."""
    return str(cupy().cuda.runtime.deviceGetPCIBusId(number))


def has_dtype(dtype: np.dtype[Any]) -> bool:
    """Local. Whether CuPy has arrays of a dtype, in whichever byte order."""
    if dtype.name == "bfloat16":
        return int(str(_imported().__version__).partition(".")[0]) >= _BFLOAT16_SINCE
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


class explained:
    """Context manager that explains errors of CUDA; see :class:`on_device`.

    A class, because the frames of a generator's context manager form a reference cycle with the
    error under Python 3.12 and 3.13, and keep pinned memory until the garbage collector runs.

    Args:
        where: The device, for messages.
        doing: The operation, for messages: ``"copying 16 bytes from it"``.
    """

    def __init__(self, where: str, doing: str) -> None:
        self._where = where
        self._doing = doing

    def __enter__(self) -> Any:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        # Errors of mpidist say enough.
        if error is None or isinstance(error, Error) or not isinstance(error, errors_of_cuda()):
            return
        # Whoever keeps the error must not keep the pinned memory that ended frames refer to.
        traceback.clear_frames(error.__traceback__)
        raise explanation(error, self._where, self._doing) from error


class on_device(explained):
    """Context manager that makes a device current; it yields the package.

    Args:
        number: Device index.
        doing: The operation, for messages: ``"copying 16 bytes from it"``.

    Raises:
        ResourceExhaustedError: The device or the host lacks memory.
        FailedPreconditionError: CUDA cannot start in this process.
        DistBackendError: CUDA failed in another way.
    """

    def __init__(self, number: int, doing: str) -> None:
        super().__init__(f"GPU {number}", doing)
        self._number = number
        self._device: Any = None

    def __enter__(self) -> Any:
        package = cupy()
        with explained(self._where, self._doing):
            # Making the current device current again would create a context, which takes memory.
            if package.cuda.runtime.getDevice() != self._number:
                self._device = package.cuda.Device(self._number)
                self._device.__enter__()
        return package

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with explained(self._where, self._doing):
            if self._device is not None:
                self._device.__exit__(kind, error, traceback)
        super().__exit__(kind, error, traceback)


def make_current(number: int) -> None:
    """Local. Make a device the current one of this thread.

    It stays so: to go back to another gives that one a context, which takes memory there.
    """
    package = cupy()
    with explained(f"GPU {number}", "making it the current device"):
        if package.cuda.runtime.getDevice() != number:
            package.cuda.Device(number).use()


def errors_of_cuda() -> tuple[type[Exception], ...]:
    """Local. What CuPy raises where CUDA fails, or memory is short."""
    cuda = _imported().cuda
    return (
        cuda.runtime.CUDARuntimeError,
        cuda.driver.CUDADriverError,
        cuda.compiler.CompileException,
        MemoryError,  # CuPy's own is one
    )
