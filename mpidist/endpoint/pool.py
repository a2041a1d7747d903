"""Memory for what arrives, used again once nobody looks at it any more.

New memory costs a page fault every 4 KiB.
"""

from __future__ import annotations

import threading

import numpy as np

from mpidist.endpoint.message import Array
from mpidist.leases import Leases


class Pool:
    """Hands out arrays, and takes their memory back when the last view of them is gone.

    Args:
        limit: Bytes that may lie idle.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle = 0
        self._free: dict[int, list[memoryview]] = {}
        self._leases = Leases(self._take_back)
        # Arrays die anywhere, on this very thread too while it holds the lock.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Array:
        """Local. An array, flat uint8, of this length; its contents are old."""
        length = 1 << max(nbytes - 1, 0).bit_length()
        memory = None
        with self._lock:
            free = self._free.get(length)
            if free:
                memory = free.pop()
                self._idle -= length
        if memory is None:
            memory = np.empty(length, np.uint8).data
        array = np.frombuffer(memory, np.uint8, nbytes)
        self._leases.lend(array, memory)
        return array

    def _take_back(self, memory: memoryview) -> None:
        with self._lock:
            if self._idle + len(memory) <= self._limit:
                self._idle += len(memory)
                self._free.setdefault(len(memory), []).append(memory)
