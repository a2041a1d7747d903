"""Some rows of a variable: their numbers, and a value for each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.array_like import on_host

Array = NDArray[Any]


@dataclass(frozen=True)
class IndexedSlices:
    """The gradient, or another change, of some rows of a variable.

    Args:
        values: One value for each row, shape ``(n, *variable.shape[1:])``.
        indices: Row numbers along the first axis of the variable: integers, shape ``(n,)``. All
            values of a repeated row number apply to the row; gradients are added. For
            ``scatter_update`` the last value counts.
    """

    values: Any
    indices: Any


def row_numbers(name: str, shape: tuple[int, ...], indices: Any) -> Array:
    """Return row numbers as a C-contiguous int64 array of the same shape.

    Args:
        name: Name of the variable, for messages.
        shape: Shape of the variable.
        indices: An array or nested lists of integers.

    Raises:
        TypeError: The row numbers are not integers.
        ValueError: The variable has no axes.
        IndexError: A row number is negative, or not less than the number of rows.
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
