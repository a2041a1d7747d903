"""A variable and a ring in the memory of a server on any node, reached by MPI's Get and Put.

The protocols are those of :mod:`strategy.shared.shard` and :mod:`strategy.shared.staging`: versions
that are odd while bytes change, and counters that one side writes each. Loads and stores become
operations of the window, each of which is complete, at the server too, before the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpidist import Window
from mpidist.mpi import Backoff
from strategy.shared.copy_scaled import copy_scaled
from strategy.shared.shard import BLOCK_BYTES, Layout
from strategy.shared.staging import COUNTER_BYTES, EMPTIED, FILLED, Patience

Array = NDArray[Any]


class OneSidedShard:
    """A shard as a worker sees it that reaches its server's memory by one-sided operations.

    Args:
        window: In which the server's memory lies.
        rank: Of the server in it.
        layout: The shard's.
        versions_offset: Of the versions in the server's part, in bytes.
        data_offset: Of the data in it, in bytes.
    """

    def __init__(
        self, window: Window, rank: int, layout: Layout, versions_offset: int, data_offset: int
    ) -> None:
        self.layout = layout
        self._window = window
        self._rank = rank
        self._places = versions_offset, data_offset

    def try_read(self, out: Array, ids: Array | None = None) -> int | None:
        """Local. See :meth:`strategy.shared.shard.SharedShard.try_read`; of rows, always None."""
        if ids is not None:
            return None
        before = self._versions(0, self.layout.blocks)
        if before[0] & 1 or not (before == before[0]).all():
            return None
        self._window.get(self._rank, self._places[1], out)
        unchanged = np.array_equal(self._versions(0, self.layout.blocks), before)
        return int(before[0]) >> 1 if unchanged else None

    def read_blocks(self, out: Array) -> None:
        """Local. See :meth:`strategy.shared.shard.SharedShard.read_blocks`."""
        step = BLOCK_BYTES // self.layout.dtype.itemsize
        flat = out.reshape(-1)
        for block in range(self.layout.blocks):
            part = flat[block * step : (block + 1) * step]
            backoff = Backoff()
            while True:
                before = self._versions(block, 1)[0]
                self._window.get(self._rank, self._places[1] + block * BLOCK_BYTES, part)
                if not before & 1 and self._versions(block, 1)[0] == before:
                    break
                backoff.pause()

    def _versions(self, first: int, count: int) -> NDArray[np.int64]:
        versions = np.empty(count, np.int64)
        self._window.get(self._rank, self._places[0] + 8 * first, versions)
        return versions


class OneSidedRing:
    """The worker's end of a ring in a server's memory on any node.

    Args:
        window: In which the server's memory lies.
        rank: Of the server in it.
        offset: Of the ring in its part, in bytes.
        slots: Number of slots.
        pump: Called again and again while the server has emptied no slot.
        peer: The server, for messages.
        lost: Whether that is gone.
    """

    def __init__(
        self,
        window: Window,
        rank: int,
        offset: int,
        slots: int,
        pump: Callable[[], object],
        peer: str,
        lost: Callable[[], bool],
    ) -> None:
        self._window = window
        self._rank = rank
        self._offset = offset
        self._slots = slots
        self._pump = pump
        self._peer = peer
        self._lost = lost
        self._filled = np.zeros(1, np.int64)
        self._emptied = np.zeros(1, np.int64)
        self._block = np.empty(BLOCK_BYTES, np.uint8)

    def write(self, flat: Array, dtype: DTypeLike, scale: float = 1.0) -> None:
        """Local. See :meth:`strategy.shared.staging.Ring.write`."""
        dtype = np.dtype(dtype)
        step = BLOCK_BYTES // dtype.itemsize
        for start in range(0, flat.size, step):
            block = flat[start : start + step]
            if block.dtype != dtype or scale != 1.0:
                staged = self._block.view(dtype)[: block.size]
                copy_scaled(staged, block, scale)
                block = staged
            self._wait_for_room()
            slot = int(self._filled[0]) % self._slots
            self._window.put(self._rank, self._offset + COUNTER_BYTES + slot * BLOCK_BYTES, block)
            self._filled += 1
            self._window.put(self._rank, self._offset + FILLED, self._filled)

    def _wait_for_room(self) -> None:
        patience = Patience(self._peer, self._lost, spins=200)
        while self._filled[0] - self._emptied[0] >= self._slots:
            self._window.get(self._rank, self._offset + EMPTIED, self._emptied)
            if self._filled[0] - self._emptied[0] < self._slots:
                return
            self._pump()
            patience.pause()
