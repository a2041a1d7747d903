"""Iterators over the values of a variable in blocks of 1 MiB, which have separate versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.shared.shard import BLOCK_BYTES

Array = NDArray[Any]
Blocks = Iterator[Array]


def in_blocks(slices: Sequence[Array], dtype: np.dtype[Any]) -> Blocks:
    """Yield values block by block. An empty variable has one block, because it has a version.

    Args:
        slices: The values, flat. All slices but the last consist of whole blocks.
        dtype: The dtype of the variable. Narrower values are converted.

    Yields:
        Flat arrays of ``dtype``. Each may be overwritten by the next one.
    """
    step = BLOCK_BYTES // dtype.itemsize
    memory: Array | None = None
    for flat in slices:
        for start in range(0, max(flat.size, 1), step):
            block = flat[start : start + step]
            if block.dtype != dtype:
                if memory is None:
                    memory = np.empty(step, dtype)
                np.copyto(memory[: block.size], block)
                block = memory[: block.size]
            yield block


def scattered(places: Array, values: Array, size: int) -> Blocks:
    """Yield an array of zeros with some elements set, block by block.

    Args:
        places: Indices of the elements, ascending.
        values: The elements.
        size: Size of the array.

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
