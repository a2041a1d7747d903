"""A pool of memory for incoming buffers. New memory would cost a page fault every 4 KiB."""

from __future__ import annotations

import threading

import numpy as np

from mpidist.leases import Leases
from mpidist.rpc.message import Array


class BufferPool:
    """Provides arrays, and reuses the memory of an array once its last view is gone.

    Args:
        limit: Bytes of unused memory to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle_bytes = 0
        self._free: dict[int, list[memoryview]] = {}
        self._leases = Leases(self._reclaim)
        # Reentrant: an array can be collected on the thread that holds the lock.
        self._lock = threading.RLock()

    def allocate(self, nbytes: int) -> Array:
        """Return a flat uint8 array. Its contents are undefined."""
        length = 1 << max(nbytes - 1, 0).bit_length()
        memory = None
        with self._lock:
            free = self._free.get(length)
            if free:
                memory = free.pop()
                self._idle_bytes -= length
        if memory is None:
            memory = np.empty(length, np.uint8).data
        array = np.frombuffer(memory, np.uint8, nbytes)
        self._leases.lend(array, memory)
        return array

    def _reclaim(self, memory: memoryview) -> None:
        with self._lock:
            if self._idle_bytes + len(memory) <= self._limit:
                self._idle_bytes += len(memory)
                self._free.setdefault(len(memory), []).append(memory)
