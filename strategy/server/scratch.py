"""Memory for what lies between, kept for the next time."""

from __future__ import annotations

from typing import Any

import numpy as np

from strategy.shared.shard import BLOCK_BYTES, Array


class Scratch:
    """Arrays of a block for what lies between, shared by the shards of a server.

    They are kept, since new memory costs a page fault every 4 KiB.
    """

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], list[Array]] = {}

    def take(self, count: int, dtype: np.dtype[Any]) -> list[Array]:
        """Local. So many flat arrays of this dtype, as long as a block; their contents are old."""
        arrays = self._arrays.setdefault(dtype, [])
        while len(arrays) < count:
            arrays.append(np.empty(BLOCK_BYTES // dtype.itemsize, dtype))
        return arrays[:count]
