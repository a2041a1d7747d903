"""Sums of rows that have the same number, compiled by numba. Needs the extra ``fast``. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.compiling import compiled

Array = NDArray[Any]


@compiled
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


def sums_of_rows(rows: Array, order: Array, starts: Array) -> Array:
    """Sum groups of rows, one row after the other. The last digits may differ from NumPy's.

    Args:
        rows: Shape ``(n, ...)``, float32 or float64.
        order: Indices of the rows, sorted by group, shape ``(n,)``.
        starts: Positions in ``order`` at which a group begins, ascending; the first is 0.

    Returns:
        The sums, shape ``(len(starts), ...)``.
    """
    sums = np.empty((len(starts), *rows.shape[1:]), rows.dtype)
    _sum_rows(rows.reshape(len(rows), -1), order, starts, sums.reshape(len(sums), -1))
    return sums
