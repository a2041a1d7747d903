"""Some rows of a variable: their numbers, and what belongs to each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import can_compile
from strategy.array_like import on_host
from strategy.shard import HALVES

Array = NDArray[Any]

_MANY = 4096
_LARGE_BYTES = 1 << 18  # a call of NumPy's is a millisecond or two from here on


@dataclass(frozen=True)
class IndexedSlices:
    """The gradient, or another change, of some rows of a variable.

    Args:
        values: What belongs to each row, shape ``(n, *variable.shape[1:])``.
        indices: Which rows, along the variable's first axis: integers, shape ``(n,)``. One that
            comes several times has all that belongs to it, for a gradient the sum.
    """

    values: Any
    indices: Any


def row_numbers(name: str, shape: tuple[int, ...], indices: Any) -> Array:
    """Local. Row numbers as a C-contiguous int64 array of their shape.

    Args:
        name: Of the variable, for messages.
        shape: Of the variable.
        indices: An array or nested lists of integers.

    Raises:
        TypeError: They are no integers.
        ValueError: The variable has no rows.
        IndexError: One is negative, or as large as the number of rows or larger.
    """
    if not shape:
        raise ValueError(f"variable {name!r} has no rows: its shape is ()")
    given = np.asarray(on_host(indices))
    if given.dtype.kind not in "iu" and given.size:
        raise TypeError(f"rows of variable {name!r} are named by integers, not {given.dtype}")
    if given.size:
        lowest, highest = given.min(), given.max()
        if lowest < 0 or highest >= shape[0]:
            wrong = lowest if lowest < 0 else highest
            raise IndexError(f"variable {name!r} has rows 0 to {shape[0] - 1}, and none {wrong}")
    return np.ascontiguousarray(given, np.int64).reshape(given.shape)


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
        from strategy.row_sums import sums_of_rows  # takes half a second

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
