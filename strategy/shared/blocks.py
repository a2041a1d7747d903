"""Changes of whole shards, block by block: a block has a version of its own. Pure.

What gives blocks may give None: the next one is not there yet, and is to be asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.shared.shard import BLOCK_BYTES

Array = NDArray[Any]
Blocks = Iterator[Array | None]


def in_blocks(flat: Array) -> Iterator[Array]:
    """Local. An array block by block; an empty one is a block too, so that it has versions."""
    step = BLOCK_BYTES // flat.itemsize
    for start in range(0, max(flat.size, 1), step):
        yield flat[start : start + step]


def widened(blocks: Blocks, dtype: np.dtype[Any]) -> Blocks:
    """Local. Blocks of halves as those of a wider dtype, which are more.

    Yields:
        Flat arrays; each is overwritten by the next.
    """
    memory = np.empty(BLOCK_BYTES // dtype.itemsize, dtype)
    for block in blocks:
        if block is None:
            yield None
            continue
        for start in range(0, max(block.size, 1), memory.size):
            part = block[start : start + memory.size]
            np.copyto(memory[: part.size], part)
            yield memory[: part.size]


def scattered(places: Array, values: Array, size: int) -> Iterator[Array]:
    """Local. Some elements of an array, the others of which are 0, block by block.

    Args:
        places: Where the elements are, ascending.
        values: The elements.
        size: Of the array.

    Yields:
        Flat arrays; each is overwritten by the next.
    """
    memory = np.empty(BLOCK_BYTES // values.itemsize, values.dtype)
    for start in range(0, max(size, 1), memory.size):
        block = memory[: min(memory.size, size - start)]
        first, last = np.searchsorted(places, (start, start + block.size))
        block[...] = 0
        block[places[first:last] - start] = values[first:last]
        yield block
