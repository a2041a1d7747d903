"""Means of what several workers push, in the order of the workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Local. The mean of several changes of a shard, block by block.

    The sum is taken in the order given, then divided; halves in float32, integers rounded down.

    Args:
        each: The blocks of each; of one alone they are given on as they are.
        layout: The shard's.
        scratch: For the sum.

    Yields:
        Flat arrays; each is overwritten by the next.
    """
    if len(each) == 1:
        yield from each[0]
        return
    (memory,) = scratch.take(1, _wide(layout))
    if layout.is_half:
        memory = np.resize(memory, 2 * memory.size)  # a block has twice as many halves
    for together in _together(each):
        if together is None:
            yield None
            continue
        first, second, *others = together
        total = memory[: first.size]
        np.add(first, second, out=total, dtype=total.dtype)
        for block in others:
            np.add(total, block, out=total, dtype=total.dtype)
        yield _divided(total, len(each))


def mean_of_rows(each: Sequence[tuple[Array, Array]], layout: Layout) -> tuple[Array, Array]:
    """Local. The mean of several changes of rows; who does not name a row adds nothing to it.

    Args:
        each: Of each the numbers of rows, each once, and what is for them, flat.
        layout: The shard's.

    Returns:
        Numbers, each once, and what is for them, flat.
    """
    if len(each) == 1:
        return each[0]
    ids, places = distinct(np.concatenate([numbers for numbers, _ in each]))
    width = layout.size // max(layout.shape[0], 1)
    # The only number that changes none that is added to it.
    total = np.full((len(ids), width), -0.0 if layout.is_floating else 0, _wide(layout))
    ends = np.cumsum([len(numbers) for numbers, _ in each])
    for here, (numbers, values) in zip(np.split(places, ends[:-1]), each, strict=True):
        part = total.take(here, axis=0)
        part += values.reshape(len(numbers), width)
        put_rows(total, here, part)
    return ids, _divided(total, len(each)).reshape(-1)


def _together(each: Sequence[Blocks]) -> Iterator[list[Array] | None]:
    """One block of each, again and again, until they end; they are equally many."""
    while True:
        found: list[Array] = []
        for blocks in each:
            for block in blocks:
                if block is not None:
                    found.append(block)
                    break
                yield None
        if not found:
            return
        if len(found) < len(each):
            raise ValueError(f"{len(each)} changes of a shard are not equally long")
        yield found


def _wide(layout: Layout) -> np.dtype[Any]:
    return np.dtype(np.float32) if layout.is_half else layout.dtype


def _divided(total: Array, count: int) -> Array:
    divide = np.floor_divide if total.dtype.kind in "iu" else np.divide
    return divide(total, total.dtype.type(count), out=total)  # type: ignore[no-any-return]
