"""Copies within this process's memory, as fast as the machine can.

Large ones are made by compiled code where the extra ``fast`` is installed. The C library has stores
that go past the caches, too, but for copies that are larger than its caches together; here they
begin earlier, where it has been measured to pay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.compiling import can_compile

Array = NDArray[Any]
_Copy = Callable[[Array, Array], None]

LARGE_BYTES = 8 << 20
"""Below, who reads the copy next mostly finds it in the caches, if it has been put there."""

# Where asking ahead pays (measured): what the caches hold is had as fast without, and of longer
# rows the machine itself fetches the rest.
_LARGE_TABLE_BYTES = 32 << 20
_MANY_ROWS = 256
_ROW_BYTES = range(64, 1025)

_lock = threading.Lock()
_choice: _Copy | None = None


def copy_array(target: Array, source: Array) -> None:
    """Local. Copy an array.

    Args:
        target: Any shape and dtype.
        source: Of the same shape; of a dtype that NumPy casts to the other's (``"same_kind"``).
    """
    if target.nbytes < LARGE_BYTES or not _are_plain(target, source):
        np.copyto(target, source)
    else:
        (_choice or _choose())(target, source)


def take_rows(table: Array, ids: NDArray[np.int64], out: Array) -> None:
    """Local. Copy rows of a table.

    Args:
        table: Shape ``(rows, ...)``.
        ids: Which rows, shape ``(n,)``; all must be there.
        out: Shape ``(n, ...)``, of the table's dtype.

    Raises:
        IndexError: Of many rows of a large table one is not there. Elsewhere it is taken to be the
            first or the last.
    """
    large = table.nbytes >= _LARGE_TABLE_BYTES and len(ids) >= _MANY_ROWS
    if large and out.flags.writeable and _are_plain_rows(table, ids, out) and can_compile():
        from mpidist.compiled_copies import take_ahead

        _check_rows(table, ids)
        take_ahead(table, ids, out)
    else:
        np.take(table, ids, axis=0, out=out, mode="clip")  # other modes copy twice


def put_rows(table: Array, ids: NDArray[np.int64], rows: Array) -> None:
    """Local. Copy rows to their places in a table, of which the caches hold these best.

    Args:
        table: Shape ``(n, ...)``.
        ids: Which rows; all must be there. What several rows leave at one place is one of them.
        rows: Shape ``(len(ids), ...)``, of the table's dtype.

    Raises:
        IndexError: One is not there.
    """
    many = len(ids) >= _MANY_ROWS and table.flags.writeable
    if many and _are_plain_rows(table, ids, rows) and can_compile():
        from mpidist.compiled_copies import put_compiled

        _check_rows(table, ids)
        put_compiled(table, ids, rows)
    else:
        if len(ids) and ids.min() < 0:  # NumPy would count from the end
            _check_rows(table, ids)
        table[ids] = rows


def _check_rows(table: Array, ids: Array) -> None:
    if not 0 <= ids.min() <= ids.max() < len(table):
        raise IndexError(f"the table has {len(table)} rows, and not all that are asked for")


def _are_plain(target: Array, source: Array) -> bool:
    """Whether a copy is one of bytes that lie one behind the other, from here to there."""
    return (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.flags.c_contiguous
        and source.flags.c_contiguous
        and target.flags.writeable
        and not target.dtype.hasobject
        and not np.may_share_memory(target, source)
    )


def _are_plain_rows(table: Array, ids: Array, rows: Array) -> bool:
    return (
        len(table) > 0
        and table.nbytes // len(table) in _ROW_BYTES
        and table.flags.c_contiguous
        and rows.flags.c_contiguous
        and rows.dtype == table.dtype
        and ids.dtype == np.int64
        and rows.shape == (*ids.shape, *table.shape[1:])
        and ids.ndim == 1
    )


def _choose() -> _Copy:
    """What copies large arrays from now on: whichever is faster here."""
    global _choice
    with _lock:
        if _choice is None:
            _choice = _faster() if can_compile() else np.copyto
    return _choice


def _faster() -> _Copy:
    from mpidist.compiled_copies import copy_past_caches

    source, target = np.zeros((2, LARGE_BYTES), np.uint8)
    sides: tuple[_Copy, _Copy] = (copy_past_caches, np.copyto)
    times = [[_seconds(side, target, source) for side in sides] for _ in range(5)]
    past_caches, plain = map(min, zip(*times, strict=True))
    return sides[plain < past_caches]


def _seconds(copy: _Copy, target: Array, source: Array) -> float:
    begin = time.perf_counter()
    copy(target, source)
    return time.perf_counter() - begin
