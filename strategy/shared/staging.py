"""A ring in the server's memory through which one connection streams large gradients.

The worker copies blocks into slots and counts them; the server applies them straight from the
slots and counts them too. One writer, one reader, and each counter written by one side only: no
locks, and no messages but the one that announces the push. The worker copies one block while the
server applies the one before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpidist import errors
from mpidist.config import config as settings
from mpidist.mpi import Backoff
from strategy.shared.blocks import Blocks
from strategy.shared.copy_scaled import copy_scaled
from strategy.shared.shard import BLOCK_BYTES

logger = logging.getLogger(__name__)

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

# Changes from this size on go through the ring; below, copying them into the message is cheaper.
STAGED_BYTES = 16384
POOL_BYTES = 64 << 20
# Seconds that the server waits for a block before it does something else meanwhile.
PATIENCE_S = 0.05
# How often a worker that waits asks whether the server is still there, in seconds.
_LOOK_S = 0.5
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


class RingBrokenError(errors.AbortedError):
    """The other end of a ring is gone, or has given up: nothing more comes, or is taken."""


class Patience:
    """Local. How a worker waits for its server to empty a slot: as long as that is there.

    Args:
        peer: The server, for messages.
        lost: Whether it is gone.
        spins: See :class:`mpidist.mpi.Backoff`.
    """

    def __init__(self, peer: str, lost: Callable[[], bool], spins: int = 2000) -> None:
        self._peer = peer
        self._lost = lost
        self._backoff = Backoff(spins)
        self._since = self._looked = time.monotonic()
        self._said = False

    def pause(self) -> None:
        """Local. Wait a little; RingBrokenError if it will be in vain."""
        self._backoff.pause()
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        if self._lost():
            raise RingBrokenError(f"a push stands still: {self._peer} has left")
        if not self._said and now - self._since >= settings.stall_s:
            self._said = True
            logger.warning(
                "a push has waited %.3g s for %s, which takes nothing from its staging ring: it "
                "is busy, as with a checkpoint, or waits for another worker, or hangs",
                now - self._since,
                self._peer,
            )


class Ring:
    """Either end of a ring.

    Args:
        memory: The server's arena.
        offset: Of the ring in it, in bytes.
        slots: Number of slots.
        sync: Orders loads and stores before it against those after it.
        pump: Called again and again by a side that waits: the other may be waiting for messages.
        peer: The other side, for messages.
        lost: Whether that is gone.
    """

    def __init__(
        self,
        memory: Bytes,
        offset: int,
        slots: int,
        sync: Callable[[], None],
        pump: Callable[[], object],
        peer: str = "the other side",
        lost: Callable[[], bool] = lambda: False,
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
        self.nbytes = slots * BLOCK_BYTES
        """How much it holds."""
        self._sync = sync
        self._pump = pump
        self._peer = peer
        self._lost = lost
        self.broken = ""
        """Why the worker streams no more, once it has said so."""

    def write(self, flat: Array, dtype: DTypeLike, scale: float = 1.0) -> None:
        """Local. The worker streams an array.

        Args:
            flat: 1-D.
            dtype: That it is converted to on the way; the variable's.
            scale: What it is multiplied with on the way.

        Raises:
            RingBrokenError: The server is gone.
            TypeError: The conversion would lose more than precision.
        """
        step = BLOCK_BYTES // np.dtype(dtype).itemsize
        for start in range(0, flat.size, step):
            block = flat[start : start + step]
            count = self._filled[0]
            if self._emptied[0] < count + 1 - len(self._slots):
                self._wait_for_room(count + 1 - len(self._slots))
            slot = self._slots[count % len(self._slots)].view(dtype)[: block.size]
            copy_scaled(slot, block, scale)
            self._sync()
            self._filled[0] = count + 1

    def read(self, size: int, dtype: DTypeLike) -> Blocks:
        """Local. The server takes an array of ``size`` elements, block by block.

        Args:
            size: Number of elements.
            dtype: The variable's.

        Yields:
            Flat arrays in the ring; each is given back by asking for more. None where the worker
            is late: so the server may do something else meanwhile.

        Raises:
            RingBrokenError: The worker is gone, or has said that no more comes.
        """
        step = BLOCK_BYTES // np.dtype(dtype).itemsize
        for start in range(0, size, step):
            count = self._emptied[0]
            yield from self._until_filled(count)
            slot = self._slots[count % len(self._slots)]
            yield slot.view(dtype)[: min(step, size - start)]
            self._sync()
            self._emptied[0] = count + 1

    def _until_filled(self, count: int) -> Iterator[None]:
        patience_s = PATIENCE_S
        while self._filled[0] <= count and not self._is_filled(count, patience_s):
            patience_s = 0.0  # whoever asks again has something else to do meanwhile
            yield None
        self._sync()

    def _is_filled(self, count: int, patience_s: float) -> bool:
        """Whether the worker fills a block before the server's patience ends."""
        if self.broken or self._lost():
            if self._filled[0] > count:  # it was the last thing that the worker did
                return True
            raise RingBrokenError(
                f"a push stands still: {self._peer} {self.broken or 'has left'}; the rest of it "
                "does not come"
            )
        backoff = Backoff(spins=2000)
        deadline = time.monotonic() + patience_s
        while self._filled[0] <= count:
            if time.monotonic() >= deadline:
                return False
            self._pump()
            backoff.pause()
        return True

    def _wait_for_room(self, emptied: int) -> None:
        patience = Patience(self._peer, self._lost)
        while self._emptied[0] < emptied:
            self._pump()
            patience.pause()
