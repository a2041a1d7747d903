"""Means of the changes of several workers, in the order of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.copying import put_rows
from strategy.server.scratch import Scratch
from strategy.shared.blocks import Blocks
from strategy.shared.rows import distinct
from strategy.shared.shard import Layout

Array = NDArray[Any]


def mean_of_blocks(each: Sequence[Blocks], layout: Layout, scratch: Scratch) -> Blocks:
    """Yield the mean of several changes of a variable, block by block.

    The changes are added in the given order, then the sum is divided. Halves are added in float32.
    Means of integers are rounded down.

    Args:
        each: The blocks of each change. The blocks of a single change are yielded unchanged.
        layout: The layout of the variable.
        scratch: Memory for the sum.

    Yields:
        Flat arrays; each is overwritten by the next.
    """
    if len(each) == 1:
        yield from each[0]
        return
    (memory,) = scratch.take(1, _wide(layout))
    if layout.is_half:
        memory = np.resize(memory, 2 * memory.size)  # a block has twice as many halves
    for first, second, *others in zip(*each, strict=True):
        total = memory[: first.size]
        np.add(first, second, out=total, dtype=total.dtype)
        for block in others:
            np.add(total, block, out=total, dtype=total.dtype)
        yield _divided(total, len(each))


def mean_of_rows(each: Sequence[tuple[Array, Array]], layout: Layout) -> tuple[Array, Array]:
    """Return the mean of several changes of rows. A row that a change lacks counts as zero.

    Args:
        each: Row numbers, each once, and flat values of each change.
        layout: The layout of the variable.

    Returns:
        Row numbers, each once, and their values, flat.
    """
    if len(each) == 1:
        return each[0]
    ids, places = distinct(np.concatenate([numbers for numbers, _ in each]))
    width = layout.size // max(layout.shape[0], 1)
    # Adding -0.0 changes no number. Adding 0.0 would change -0.0 to 0.0.
    total = np.full((len(ids), width), -0.0 if layout.is_floating else 0, _wide(layout))
    ends = np.cumsum([len(numbers) for numbers, _ in each])
    for here, (numbers, values) in zip(np.split(places, ends[:-1]), each, strict=True):
        part = total.take(here, axis=0)
        part += values.reshape(len(numbers), width)
        put_rows(total, here, part)
    return ids, _divided(total, len(each)).reshape(-1)


def _wide(layout: Layout) -> np.dtype[Any]:
    return np.dtype(np.float32) if layout.is_half else layout.dtype


def _divided(total: Array, count: int) -> Array:
    divide = np.floor_divide if total.dtype.kind in "iu" else np.divide
    return divide(total, total.dtype.type(count), out=total)  # type: ignore[no-any-return]
