"""What errors of CUDA mean, and what to do about them. Pure, but for who this process is."""

from __future__ import annotations

from mpidist.errors import DistBackendError, Error, FailedPreconditionError, ResourceExhaustedError
from mpidist.runtime import this_rank

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, and CUDA_ERROR_OUT_OF_MEMORY
_NOT_INITIALIZED = 3

# CUDA's own manual has a process end after them: every later call gives the same error.
_LOST = frozenset(
    (214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999)
)
_OF_BAD_MEMORY = frozenset((1, 17, 101, 400))
_BY_NUMBER = {
    _NOT_INITIALIZED: "CUDA cannot begin in this process: look at nvidia-smi and dmesg; if this "
    "process was forked from one that had used CUDA, start it with the 'spawn' or 'forkserver' "
    "method",
    35: "there is no driver of NVIDIA's here, or an older one than this CuPy needs (cupy-cuda12x, "
    "cupy-cuda13x): nvidia-smi shows its version of CUDA",
    46: "the device is exclusive to another process, or prohibited (nvidia-smi -q -d COMPUTE shows "
    "the mode): give each process of the host a device of its own, or have the mode set to "
    "default, or MPS started",
    100: "there is no device: look at nvidia-smi, and at CUDA_VISIBLE_DEVICES",
    802: "the host is not ready for CUDA: look whether its daemons run (nvidia-fabricmanager)",
    803: "the driver's parts are of different versions: the host must be restarted",
}
_BAD_MEMORY = (
    "perhaps the memory of an array was freed, or the device was reset, while the array was still "
    "in use: keep the array, or what owns its memory, until the operation has ended"
)
_IS_LOST = (
    "The device is lost to this process: every later call fails, and the process must end. A "
    "kernel of this process may be the cause (CUDA_LAUNCH_BLOCKING=1 shows which), or the device "
    "itself (nvidia-smi and dmesg tell)"
)
_TELLS_LATE = (
    "CUDA tells late: an earlier kernel of this process may be the cause (CUDA_LAUNCH_BLOCKING=1 "
    "shows which)"
)


def is_out_of_memory(error: Exception) -> bool:
    """Local. Whether an error of CUDA, or of Python, is the lack of memory."""
    return isinstance(error, MemoryError) or _status(error) == _OUT_OF_MEMORY


def is_final(error: Exception) -> bool:
    """Local. Whether this process cannot use a device, or cannot any more."""
    return _status(error) in _LOST or _status(error) in _BY_NUMBER


def explanation(error: Exception, where: str, doing: str) -> Error:
    """Local. The error to raise for one of CUDA.

    Args:
        error: Of CUDA, or a lack of memory.
        where: The device, or host: ``"GPU 0"``.
        doing: What was done: ``"copying 16 bytes from it"``.
    """
    where, status = place(where), _status(error)
    if is_out_of_memory(error):
        if type(error) is MemoryError:  # CuPy's own is another
            where = place("the host")
        return ResourceExhaustedError(f"{where} has not enough memory for {doing}: {error}")
    what = f"{doing} failed on {where}: {error}"
    if status in _LOST:
        return DistBackendError(f"{what}. {_IS_LOST}")
    if status in _OF_BAD_MEMORY:
        return DistBackendError(f"{what}: {_BAD_MEMORY}. {_TELLS_LATE}")
    if status in _BY_NUMBER:
        kind = FailedPreconditionError if status != 46 else DistBackendError
        return kind(f"{what}: {_BY_NUMBER[status]}")
    return DistBackendError(f"{what}. {_TELLS_LATE}")


def place(where: str) -> str:
    """Local. A device or host, and the rank that speaks of it, if there is one."""
    rank = this_rank()
    return f"{where} of {rank}" if rank else where


def _status(error: Exception) -> int:
    return int(getattr(error, "status", 0) or 0)
