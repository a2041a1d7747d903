"""Fast copies within the memory of this process.

With the extra ``fast``, compiled code makes large copies by non-temporal stores. The C library uses
such stores only for copies larger than all caches together, and smaller copies were measured to
gain from them, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.compiling import can_compile

Array = NDArray[Any]
_Copy = Callable[[Array, Array], None]

LARGE_BYTES = 8 << 20
"""Smaller copies go through the caches, where the next reader mostly finds them."""

# Prefetching pays from these sizes (measured): smaller tables are in the caches, and the hardware
# prefetches the rest of longer rows.
_LARGE_TABLE_BYTES = 32 << 20
_MANY_ROWS = 256
_ROW_BYTES = range(64, 1025)

_lock = threading.Lock()
_choice: _Copy | None = None


def copy_array(target: Array, source: Array) -> None:
    """Copy an array.

    Args:
        target: Array of any shape and dtype.
        source: Array of the same shape, of a dtype that NumPy casts to the target's
            (``"same_kind"``).
    """
    if target.nbytes < LARGE_BYTES or not _are_plain(target, source):
        np.copyto(target, source)
    else:
        (_choice or _choose())(target, source)


def take_rows(table: Array, ids: NDArray[np.int64], out: Array) -> None:
    """Copy rows out of a table.

    Args:
        table: Shape ``(rows, ...)``.
        ids: Indices of the rows, shape ``(n,)``, each within the table.
        out: Shape ``(n, ...)``, of the dtype of the table.

    Raises:
        IndexError: An index is outside a large table. In small tables such an index is clipped.
    """
    large = table.nbytes >= _LARGE_TABLE_BYTES and len(ids) >= _MANY_ROWS
    if large and out.flags.writeable and _are_plain_rows(table, ids, out) and can_compile():
        from mpidist.buffers.compiled_copies import take_ahead

        _check_rows(table, ids)
        take_ahead(table, ids, out)
    else:
        np.take(table, ids, axis=0, out=out, mode="clip")  # other modes copy twice


def put_rows(table: Array, ids: NDArray[np.int64], rows: Array) -> None:
    """Copy rows into a table.

    Args:
        table: Shape ``(n, ...)``.
        ids: Indices of the rows. If an index occurs several times, one of the rows stays.
        rows: Shape ``(len(ids), ...)``, of the dtype of the table.

    Raises:
        IndexError: An index is outside the table.
    """
    many = len(ids) >= _MANY_ROWS and table.flags.writeable
    if many and _are_plain_rows(table, ids, rows) and can_compile():
        from mpidist.buffers.compiled_copies import put_compiled

        _check_rows(table, ids)
        put_compiled(table, ids, rows)
    else:
        if len(ids) and ids.min() < 0:  # NumPy would count from the end
            _check_rows(table, ids)
        table[ids] = rows


def _check_rows(table: Array, ids: Array) -> None:
    if not 0 <= ids.min() <= ids.max() < len(table):
        raise IndexError(f"the table has {len(table)} rows, and an index is outside")


def _are_plain(target: Array, source: Array) -> bool:
    """Return whether a copy is one of contiguous bytes."""
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
    """Return the function that copies large arrays from now on: the faster one here."""
    global _choice
    with _lock:
        if _choice is None:
            _choice = _faster() if can_compile() else np.copyto
    return _choice


def _faster() -> _Copy:
    from mpidist.buffers.compiled_copies import copy_past_caches

    source, target = np.zeros((2, LARGE_BYTES), np.uint8)
    sides: tuple[_Copy, _Copy] = (copy_past_caches, np.copyto)
    times = [[_seconds(side, target, source) for side in sides] for _ in range(5)]
    past_caches, plain = map(min, zip(*times, strict=True))
    return sides[plain < past_caches]


def _seconds(copy: _Copy, target: Array, source: Array) -> float:
    begin = time.perf_counter()
    copy(target, source)
    return time.perf_counter() - begin
