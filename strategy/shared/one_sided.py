"""A variable in the memory of a server on any node, read by MPI's Get.

Readers follow the sequence lock of :mod:`strategy.shared.shard`: versions are odd while bytes
change. Each operation of the window is complete before the next operation begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Window
from mpidist.mpi import Backoff
from strategy.shared.shard import BLOCK_BYTES, Layout

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
