"""A variable in the memory of a server on any node, read by MPI's Get.

Readers follow the sequence lock of :mod:`strategy.shared.shard`: versions are odd while bytes
change. Each Get is complete before the next one begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.mpi import Backoff
from mpidist.ps_memory import PsMemory
from strategy.shared.shard import BLOCK_BYTES, Layout

Array = NDArray[Any]


class OneSidedShard:
    """A shard that a worker reads by MPI's Get.

    Args:
        memory: The memory of the ps tasks.
        index: Index of the ps task that holds the shard.
        layout: Shape and dtype.
        versions: Address of the versions at the ps task.
        data: Address of the values at the ps task.
    """

    def __init__(
        self, memory: PsMemory, index: int, layout: Layout, versions: int, data: int
    ) -> None:
        self.layout = layout
        self._memory = memory
        self._index = index
        self._addresses = versions, data

    def try_read(self, out: Array, ids: Array | None = None) -> int | None:
        """See :meth:`strategy.shared.shard.SharedShard.try_read`; always None for rows."""
        if ids is not None:
            return None
        before = self._versions(0, self.layout.blocks)
        if before[0] & 1 or not (before == before[0]).all():
            return None
        self._memory.get(self._index, self._addresses[1], out)
        unchanged = np.array_equal(self._versions(0, self.layout.blocks), before)
        return int(before[0]) >> 1 if unchanged else None

    def read_blocks(self, out: Array) -> None:
        """See :meth:`strategy.shared.shard.SharedShard.read_blocks`."""
        step = BLOCK_BYTES // self.layout.dtype.itemsize
        flat = out.reshape(-1)
        for block in range(self.layout.blocks):
            part = flat[block * step : (block + 1) * step]
            backoff = Backoff()
            while True:
                before = self._versions(block, 1)[0]
                self._memory.get(self._index, self._addresses[1] + block * BLOCK_BYTES, part)
                if not before & 1 and self._versions(block, 1)[0] == before:
                    break
                backoff.pause()

    def _versions(self, first: int, count: int) -> NDArray[np.int64]:
        versions = np.empty(count, np.int64)
        self._memory.get(self._index, self._addresses[0] + 8 * first, versions)
        return versions
