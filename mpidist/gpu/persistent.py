"""Memory that a server keeps: arrays on a device, and host memory pinned in place."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np

from mpidist.gpu.cupy_api import cuda_errors, cupy, is_out_of_memory, on_device
from mpidist.gpu.pinned_pool import Bytes
from mpidist.gpu.staging import return_memory
from mpidist.gpu.streams import logger

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process
_warned: list[str] = []


def allocate_persistent(device: int, size: int, dtype: np.dtype[Any], owner: str) -> Any:
    """Return a flat CuPy array, not initialized. Its end returns the memory to the device.

    CuPy's pool would keep the memory for this process.

    Args:
        device: Device index.
        size: Number of elements.
        dtype: A dtype that CuPy has.
        owner: The owner, for messages: ``"variable 'w'"``.

    Raises:
        ResourceExhaustedError: The device has no memory.
        DistBackendError: CUDA failed.
    """
    nbytes = size * dtype.itemsize
    with on_device(device, "%d bytes of %s", nbytes, owner) as package:
        try:
            memory = package.cuda.Memory(max(nbytes, 1))
        except cuda_errors() as error:
            if not is_out_of_memory(error):
                raise
            return_memory(device)
            package.get_default_memory_pool().free_all_blocks()
            memory = package.cuda.Memory(max(nbytes, 1))
        return package.ndarray((size,), dtype, package.cuda.MemoryPointer(memory, 0))


class Pinned:
    """Host memory that is pinned in place until :meth:`close`; made by :func:`pin`."""

    def __init__(self, memory: Bytes) -> None:
        self._memory: Bytes | None = memory

    def close(self) -> None:
        """Unpin the memory. No device may use it. A second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            # A device that is lost has released the memory already.
            with suppress(*cuda_errors()):
                cupy().cuda.runtime.hostUnregister(memory.ctypes.data)


def pin(memory: Bytes, device: int) -> Pinned | None:
    """Pin host memory in place, so that a device copies straight from and to it.

    Args:
        memory: Whole pages that exist, none of which is pinned.
        device: Device index.

    Returns:
        A handle that unpins the memory; None, after one warning, if the system refuses.
    """
    address = memory.ctypes.data
    if address % mmap.PAGESIZE or memory.nbytes % mmap.PAGESIZE or not memory.nbytes:
        raise ValueError(f"{memory.nbytes} bytes at {address:#x} are no whole pages")
    with on_device(device, "pinning memory") as package:
        try:
            package.cuda.runtime.hostRegister(address, memory.nbytes, _PORTABLE)
        except cuda_errors() as error:
            if not _warned:
                _warned.append(str(error))
                logger.warning(
                    "host memory cannot be pinned in place (%s): copies to and from GPU %d go "
                    "through a staging buffer, and take a little longer; see the limits that "
                    "containers and batch systems set (ulimit -l)",
                    error,
                    device,
                )
            return None
    return Pinned(memory)
