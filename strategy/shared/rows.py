"""Rows by their numbers: each once, and what belongs to it together. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.compiling import can_compile
from strategy.shared.shard import HALVES

Array = NDArray[Any]

_MANY = 4096
_LARGE_BYTES = 1 << 18  # a call of NumPy's is a millisecond or two from here on


def merged(ids: Array, rows: Array, combine: np.ufunc | None) -> tuple[Array, Array]:
    """Local. Each row once, in ascending order.

    Args:
        ids: Row numbers, shape ``(n,)``.
        rows: What belongs to them, shape ``(n, ...)``.
        combine: What becomes of several for one row; None takes the last.

    Returns:
        Numbers and rows; the given arrays themselves if nothing had to be done.
    """
    steps = np.diff(ids)
    if (steps > 0).all():
        return ids, rows
    order = _ascending(ids)
    ids = ids[order]
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    if combine is None or len(starts) == len(ids):
        last = np.append(starts[1:], len(ids)) - 1
        return ids[last], rows.take(order[last], axis=0)
    wide = rows.astype(np.float32) if rows.dtype in HALVES else rows
    if combine is np.add:
        together = sums(wide, order, starts)
    else:
        together = combine.reduceat(wide.take(order, axis=0), starts, axis=0)
    return ids[starts], together.astype(rows.dtype, copy=False)


def distinct(ids: Array) -> tuple[Array, Array]:
    """Local. Each number once, in ascending order, and for each given one the place of its like.

    Args:
        ids: Row numbers, shape ``(n,)``, int64.
    """
    order = _ascending(ids)
    ids = ids[order]
    is_new = np.diff(ids, prepend=ids[:1] - 1) > 0
    places = np.empty(len(ids), np.intp)
    places[order] = np.cumsum(is_new) - 1
    return ids[is_new], places


def grouped(ids: Array) -> tuple[Array, Array, Array]:
    """Local. Each number once, in ascending order, and where all that belongs to it is.

    Args:
        ids: Row numbers, shape ``(n,)``, int64.

    Returns:
        The numbers; the order in which like ones follow each other, as they come; and where in it
        each number begins, with its end as the last.
    """
    order = _ascending(ids)
    ids = ids[order]
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
    return ids[starts], order, np.append(starts, len(ids))


def sums(rows: Array, order: Array, starts: Array) -> Array:
    """Local. Sums of rows; with the extra ``fast``, and where they are many, by compiled code.

    Args:
        rows: Shape ``(n, ...)``.
        order: In which they come, shape ``(n,)``.
        starts: Places in ``order`` where a sum begins; ascending, the first is 0.

    Returns:
        Shape ``(len(starts), ...)``.
    """
    floating = rows.dtype in (np.float32, np.float64)
    if floating and rows.nbytes >= _LARGE_BYTES and can_compile():
        from strategy.shared.row_sums import sums_of_rows  # takes half a second

        return sums_of_rows(rows, order, starts)
    result: Array = np.add.reduceat(rows.take(order, axis=0), starts, axis=0)
    return result


def _ascending(ids: Array) -> Array:
    """The stable order of numbers.

    NumPy sorts 16 bits by their digits, and more by comparing; several times 16 bits, the lowest
    first, are sooner done where there are many (Knuth, TAOCP 3, 5.2.5).
    """
    if len(ids) < _MANY or ids.min() < 0:
        return np.argsort(ids, kind="stable")
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    for shift in range(16, int(ids.max()).bit_length(), 16):
        digits = (ids >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order
