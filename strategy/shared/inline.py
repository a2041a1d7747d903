"""What travels inside the message of a push: the values of its changes, and numbers of rows.

The values of all changes lie one behind the other, in one array for each dtype, so that a push of
many small variables costs little more than one of a large one. Both sides take the arrays in the
order in which entries first need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from strategy.shared.copy_scaled import copy_scaled

if TYPE_CHECKING:
    from strategy.connection.change import Change

Array = NDArray[Any]

MOST_PUSHES = 16
"""Pushes of a connection that may be under way at once; each holds a copy of its small changes."""


class Enclosed:
    """Local. Collects the arrays of a message."""

    def __init__(self) -> None:
        self._parts: list[Array | list[Change]] = []
        self._values: dict[np.dtype[Any], list[Change]] = {}

    def add(self, change: Change) -> None:
        """Local. Add a change."""
        if change.ids is not None:
            self._parts.append(change.ids)
        if change.places is not None:
            self._parts.append(change.places)
        values = self._values.get(change.travels_in)
        if values is None:
            values = self._values[change.travels_in] = []
            self._parts.append(values)
        values.append(change)

    def arrays(self) -> list[Array]:
        """Local. The arrays; values are copies, so that callers may change theirs at once."""
        return [_joined(part) if isinstance(part, list) else part for part in self._parts]


def _joined(changes: Sequence[Change]) -> Array:
    """The values of changes of one dtype, one behind the other."""
    dtype, scale = changes[0].travels_in, changes[0].scale
    sizes = [change.data.size for change in changes]
    flat = np.empty(sum(sizes), dtype)
    if all(change.data.dtype == dtype and change.scale == scale for change in changes):
        np.concatenate([change.data.reshape(-1) for change in changes], out=flat)
        if scale != 1.0:
            copy_scaled(flat, flat, scale)
        return flat
    begin = 0
    for change, size in zip(changes, sizes, strict=True):
        part = flat[begin : begin + size].reshape(change.data.shape)
        copy_scaled(part, change.data, change.scale)
        begin += size
    return flat


class Disclosed:
    """Local. Gives the arrays of a message back.

    Args:
        arrays: Of the message, flat uint8.
    """

    def __init__(self, arrays: Iterator[Array]) -> None:
        self._arrays = arrays
        self._values: dict[np.dtype[Any], Array] = {}

    def numbers(self) -> NDArray[np.int64]:
        """Local. The next numbers of rows or elements."""
        return self._next(np.dtype(np.int64))

    def values(self, dtype: np.dtype[Any], size: int) -> Array:
        """Local. The next values of a dtype, flat.

        Raises:
            InvalidArgumentError: The message has not so many.
        """
        left = self._values.get(dtype)
        if left is None:
            left = self._next(dtype)
        if left.size < size:
            raise errors.InvalidArgumentError(
                f"a push has {left.size} values of {dtype} where {size} are needed"
            )
        self._values[dtype] = left[size:]
        return left[:size]

    def _next(self, dtype: np.dtype[Any]) -> Array:
        """The next array; copied only where compiled rules would not take it."""
        flat = next(self._arrays).view(dtype)
        flags = flat.flags
        return flat if flags.aligned and flags.writeable else flat.copy()
