"""A ring in the server's memory through which one connection streams large gradients.

The worker copies blocks into slots and counts them; the server applies them straight from the
slots and counts them too. One writer, one reader, and each counter written by one side only: no
locks, and no messages but the one that announces the push. The worker copies one block while the
server applies the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpidist import Backoff, errors
from strategy.kernels import copy_scaled
from strategy.shard import BLOCK_BYTES

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

# Changes from this size on go through the ring; below, copying them into the message is cheaper.
STAGED_BYTES = 16384
POOL_BYTES = 64 << 20
# Seconds that one side waits for the other.
STALL_S = 60.0
# The two counters lie on cache lines of their own, before the slots.
FILLED, EMPTIED, COUNTER_BYTES = 0, 64, 128


def slots_for(workers: int) -> int:
    """Local. Blocks of each ring, if every worker has one: an equal part of the pool, 1 to 3.

    A ring that fits the cache is faster than a longer one that does not (measured: 2 and 3 blocks
    within 3 %, 8 blocks a fifth slower); three let one side be late once.
    """
    share = POOL_BYTES // BLOCK_BYTES // workers
    return max(1, min(share, 3))


def ring_bytes(slots: int) -> int:
    """Local. Length of a ring of so many slots."""
    return COUNTER_BYTES + slots * BLOCK_BYTES


def standstill(verb: str, limit_s: float) -> errors.DeadlineExceededError:
    """Local. What is raised when the other side of a ring does nothing for so many seconds."""
    return errors.DeadlineExceededError(
        f"a push stands still: the other side did not {verb} a block of the staging ring within "
        f"{limit_s:g} s; it is stuck or gone"
    )


class Ring:
    """Either end of a ring.

    Args:
        memory: The server's arena.
        offset: Of the ring in it, in bytes.
        slots: Number of slots.
        sync: Orders loads and stores before it against those after it.
        pump: Called again and again by a side that waits: the other may be waiting for messages.
        limit_s: Seconds that one side waits for the other.
    """

    def __init__(
        self,
        memory: Bytes,
        offset: int,
        slots: int,
        sync: Callable[[], None],
        pump: Callable[[], object],
        limit_s: float = STALL_S,
    ) -> None:
        self._filled, self._emptied = (
            memory[offset + place : offset + place + 8].view(np.int64).data
            for place in (FILLED, EMPTIED)
        )
        start = offset + COUNTER_BYTES
        self._slots = [
            memory[start + slot * BLOCK_BYTES : start + (slot + 1) * BLOCK_BYTES]
            for slot in range(slots)
        ]
        self._sync = sync
        self._pump = pump
        self._limit_s = limit_s

    def write(self, flat: Array, dtype: DTypeLike, scale: float = 1.0) -> None:
        """Local. The worker streams an array.

        Args:
            flat: 1-D.
            dtype: That it is converted to on the way; the variable's.
            scale: What it is multiplied with on the way.

        Raises:
            DeadlineExceededError: The server takes nothing from the ring.
            TypeError: The conversion would lose more than precision.
        """
        step = BLOCK_BYTES // np.dtype(dtype).itemsize
        for start in range(0, flat.size, step):
            block = flat[start : start + step]
            count = self._filled[0]
            self._wait(self._emptied, count + 1 - len(self._slots), "empty")
            slot = self._slots[count % len(self._slots)].view(dtype)[: block.size]
            copy_scaled(slot, block, scale)
            self._sync()
            self._filled[0] = count + 1

    def read(self, size: int, dtype: DTypeLike) -> Iterator[Array]:
        """Local. The server takes an array of ``size`` elements, block by block.

        Args:
            size: Number of elements.
            dtype: The variable's.

        Yields:
            Flat arrays in the ring; each is given back by asking for more.

        Raises:
            DeadlineExceededError: The worker puts nothing into the ring.
        """
        step = BLOCK_BYTES // np.dtype(dtype).itemsize
        for start in range(0, size, step):
            count = self._emptied[0]
            self._wait(self._filled, count + 1, "fill")
            self._sync()
            slot = self._slots[count % len(self._slots)]
            yield slot.view(dtype)[: min(step, size - start)]
            self._sync()
            self._emptied[0] = count + 1

    def _wait(self, counter: memoryview, at_least: int, verb: str) -> None:
        if counter[0] >= at_least:
            return
        backoff = Backoff(spins=2000)
        deadline = time.monotonic() + self._limit_s
        while counter[0] < at_least:
            if time.monotonic() >= deadline:
                raise standstill(verb, self._limit_s)
            self._pump()
            backoff.pause()
