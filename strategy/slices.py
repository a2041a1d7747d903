"""Some rows of a variable: their numbers, and what belongs to each. Pure."""

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
