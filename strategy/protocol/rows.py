"""Row numbers of sparse changes: unique rows, and sums of repeated ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.compiling import can_compile, compiled
from strategy.protocol.layout import HALVES

Array = NDArray[Any]


def _sum_rows(rows: Any, order: Any, starts: Any, sums: Any) -> None:
    for j in range(starts.size):
        end = starts[j + 1] if j + 1 < starts.size else order.size
        total, first = sums[j], rows[order[starts[j]]]
        for k in range(total.size):
            total[k] = first[k]
        for i in range(starts[j] + 1, end):
            row = rows[order[i]]
            for k in range(total.size):
                total[k] += row[k]


_compiled = cache(compiled)  # a second call would compile or load the function again
_MANY = 4096
_LARGE_BYTES = 1 << 18  # from this size on, a call of NumPy takes 1 to 2 ms


def merged(ids: Array, rows: Array, combine: np.ufunc | None) -> tuple[Array, Array]:
    """Merge rows with the same number, and sort them by number.

    Args:
        ids: Row numbers, shape ``(n,)``.
        rows: The rows, shape ``(n, ...)``. Half precision is reduced in float32.
        combine: The reduction of rows with the same number; None keeps the last row.

    Returns:
        Unique numbers, ascending, and their rows. The arguments if they are so already.
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
    """Return the unique numbers, ascending, and the index of each number among them.

    The same as ``np.unique(ids, return_inverse=True)``.

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
    """Sum groups of rows. The extra ``fast`` adds compiled code for many rows.

    Compiled code adds one row after the other, so the last digits may differ from NumPy's.

    Args:
        rows: Shape ``(n, ...)``.
        order: Indices of the rows, sorted by group, shape ``(n,)``.
        starts: Positions in ``order`` at which a group begins, ascending; the first is 0.

    Returns:
        The sums, shape ``(len(starts), ...)``.
    """
    floating = rows.dtype in (np.float32, np.float64)
    if not (floating and rows.nbytes >= _LARGE_BYTES and can_compile()):
        added: Array = np.add.reduceat(rows.take(order, axis=0), starts, axis=0)
        return added
    result = np.empty((len(starts), *rows.shape[1:]), rows.dtype)
    add = _compiled(_sum_rows)
    add(rows.reshape(len(rows), -1), order, starts, result.reshape(len(starts), -1))
    return result


def _ascending(ids: Array) -> Array:
    """Return the stable order that sorts numbers.

    NumPy has a radix sort for 16-bit integers only. For many numbers, several radix sorts of 16
    bits, the lowest bits first, are faster than its comparison sort (Knuth, TAOCP 3, 5.2.5).
    """
    if len(ids) < _MANY or ids.min() < 0:
        return np.argsort(ids, kind="stable")
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    for shift in range(16, int(ids.max()).bit_length(), 16):
        digits = (ids >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order
