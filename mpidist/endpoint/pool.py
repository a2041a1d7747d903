"""Memory for what arrives, used again once nobody looks at it any more.

New memory costs a page fault every 4 KiB.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

from mpidist.endpoint.message import Array


class _Lease(weakref.ref[Array]):
    """Dies with the array that was handed out, and with every view of it."""

    __slots__ = ("memory",)

    memory: memoryview


class Pool:
    """Hands out arrays, and takes their memory back when the last view of them is gone.

    Args:
        limit: Bytes that may lie idle.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle = 0
        self._free: dict[int, list[memoryview]] = {}
        self._leases: dict[int, _Lease] = {}
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
        # Views of an array keep alive the array that was made from foreign memory.
        array = np.frombuffer(memory, np.uint8, nbytes)
        lease = _Lease(array, self._take_back)
        lease.memory = memory
        self._leases[id(lease)] = lease
        return array

    def _take_back(self, lease: Any) -> None:
        del self._leases[id(lease)]
        memory = lease.memory
        with self._lock:
            if self._idle + len(memory) <= self._limit:
                self._idle += len(memory)
                self._free.setdefault(len(memory), []).append(memory)
