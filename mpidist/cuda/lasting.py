"""Memory that is kept for long: on a device, and on the host, pinned where it lies."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np

from mpidist.cuda.blocks import Bytes, device_pool
from mpidist.cuda.failures import is_out_of_memory
from mpidist.cuda.library import cupy, errors_of_cuda, on_device
from mpidist.cuda.streams import logger

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process
_said: list[str] = []


def lasting_array(number: int, size: int, dtype: np.dtype[Any], what: str) -> Any:
    """Local. A flat CuPy array in memory of its own, which the device has back when it is gone.

    CuPy's pool would keep it for this process.

    Args:
        number: Of the device.
        size: Number of elements, which are not initialized.
        dtype: One that CuPy has.
        what: For messages: ``"variable 'w'"``.

    Raises:
        ResourceExhaustedError: The device has no memory.
        DistBackendError: CUDA failed.
    """
    nbytes = size * dtype.itemsize
    with on_device(number, f"{nbytes} bytes of {what}") as package:
        memory = _allocated(package, number, max(nbytes, 1))
        return package.ndarray((size,), dtype, package.cuda.MemoryPointer(memory, 0))


def _allocated(package: Any, number: int, nbytes: int) -> Any:
    """Memory past CuPy's pool, which first gives up what lies idle there if there is no other."""
    try:
        return package.cuda.Memory(nbytes)
    except errors_of_cuda() as error:
        if not is_out_of_memory(error):
            raise
    device_pool(number).drop_idle()
    package.get_default_memory_pool().free_all_blocks()
    return package.cuda.Memory(nbytes)


class Pinned:
    """Memory of the host that is pinned where it lies, until :meth:`close`; made by :func:`pin`."""

    def __init__(self, memory: Bytes) -> None:
        self._memory: Bytes | None = memory

    def close(self) -> None:
        """Local. Pin it no more; no device may be copying from or to it. Twice is once."""
        memory, self._memory = self._memory, None
        if memory is not None:
            # A device that is lost has let go of it.
            with suppress(*errors_of_cuda()):
                cupy().cuda.runtime.hostUnregister(memory.ctypes.data)


def pin(memory: Bytes, number: int) -> Pinned | None:
    """Local. Pin memory of the host where it lies, so that a device copies straight from and to it.

    Args:
        memory: Whole pages, all of which are there; nobody else pins any of them.
        number: Of the device.

    Returns:
        What unpins it; None where the system does not let it be pinned, which is said once.
    """
    address = memory.ctypes.data
    if address % mmap.PAGESIZE or memory.nbytes % mmap.PAGESIZE or not memory.nbytes:
        raise ValueError(f"{memory.nbytes} bytes at {address:#x} are no whole pages")
    with on_device(number, "pinning memory") as package:
        try:
            package.cuda.runtime.hostRegister(address, memory.nbytes, _PORTABLE)
        except errors_of_cuda() as error:
            if not _said:
                _said.append(str(error))
                logger.warning(
                    "memory of the host cannot be pinned where it lies (%s): copies to and from "
                    "GPU %d take a way round, and a little longer; see what containers and batch "
                    "systems allow (ulimit -l)",
                    error,
                    number,
                )
            return None
    return Pinned(memory)
