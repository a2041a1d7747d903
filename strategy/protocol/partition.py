"""Parts of variables: ranges along one axis, or of the flattened elements. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.proto import parameter_server_pb2 as pb

Array = NDArray[Any]
Shape = tuple[int, ...]

Partitioner = Callable[[Shape, "np.dtype[Any]"], "Sequence[int] | int"]
"""A function of the shape and dtype of a variable that returns the number of parts.

The result has one number for each axis, and at most one of them is not 1. Or the result is a single
number of ranges of the flattened elements.
"""


@dataclass(frozen=True)
class Part:
    """A range of a variable along one axis, or of its flattened elements.

    Attributes:
        whole: Shape of the variable.
        axis: The axis; None for the flattened elements.
        start: First index of the range.
        stop: End of the range, exclusive.
    """

    whole: Shape
    axis: int | None
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        """The shape of the part. A part of the flattened elements has one axis."""
        length = self.stop - self.start
        if self.axis is None:
            return (length,)
        return (*self.whole[: self.axis], length, *self.whole[self.axis + 1 :])

    @property
    def offset(self) -> Shape:
        """The first index along each axis; one index for a part of the flattened elements."""
        if self.axis is None:
            return (self.start,)
        return tuple(self.start if axis == self.axis else 0 for axis in range(len(self.whole)))

    @property
    def is_whole(self) -> bool:
        """True if the part is the whole variable."""
        length = math.prod(self.whole) if self.axis is None else self.whole[self.axis]
        return (self.start, self.stop) == (0, length)

    def of(self, array: Array) -> Array:
        """Return the part of an array of the whole shape, as a view if NumPy allows one."""
        if self.axis is None:
            return array.reshape(-1)[self.start : self.stop]
        return array[(*(slice(None),) * self.axis, slice(self.start, self.stop))]

    def within(self, other: Part, array: Array) -> Array:
        """Return this part of an array with the shape of a larger part along the same axis."""
        here = slice(self.start - other.start, self.stop - other.start)
        return array[(*(slice(None),) * (self.axis or 0), here)]

    def along(self, axis: int | None) -> Part | None:
        """Return the same elements as a part along another axis; None if there is none."""
        if axis == self.axis:
            return self
        if axis is None and self.axis == 0:
            width = math.prod(self.whole[1:])
            return Part(self.whole, None, self.start * width, self.stop * width)
        if not self.is_whole:
            return None
        return Part(
            self.whole, axis, 0, math.prod(self.whole) if axis is None else self.whole[axis]
        )


@dataclass(frozen=True)
class Origin:
    """A part of a variable that a server holds.

    Attributes:
        variable: Name of the variable.
        part: The part.
    """

    variable: str
    part: Part


def part_of(shape: Shape, message: pb.PartOf) -> Part:
    """Return the part that a message describes of a variable with this shape."""
    axis = message.axis if message.HasField("axis") else None
    return Part(shape, axis, message.start, message.stop)


def origin_of(message: pb.CreateRequest | pb.ServedVariable) -> Origin:
    """Return the variable and the part of it that a message describes."""
    return Origin(message.variable, part_of(tuple(message.whole), message.part))


def whole(shape: Shape) -> Part:
    """Return a whole variable as one part."""
    return Part(shape, None, 0, math.prod(shape))


def divided(name: str, shape: Shape, dtype: np.dtype[Any], partitioner: Partitioner) -> list[Part]:
    """Divide a variable into parts by a partitioner.

    The first ``n % parts`` parts of an axis of length n are longer by one.

    Args:
        name: Name of the variable, for messages.
        shape: Shape of the variable. A scalar is never divided.
        dtype: Dtype of the variable.
        partitioner: See :data:`Partitioner`.

    Raises:
        TypeError: The partitioner does not return integers.
        ValueError: The numbers of parts do not fit the shape.
    """
    if not shape:
        return [whole(shape)]
    if not callable(partitioner):
        raise TypeError(
            f"the partitioner of variable {name!r} is {partitioner!r}, not a function of shape and "
            "dtype; see strategy.partitioners"
        )
    given = partitioner(shape, dtype)
    if not isinstance(given, int | np.integer | list | tuple):
        raise TypeError(f"the partitioner of variable {name!r} gives {given!r}, not integers")
    flat = isinstance(given, int | np.integer)
    counts: list[Any] = [given] if isinstance(given, int | np.integer) else list(given)
    lengths = (math.prod(shape),) if flat else shape
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in counts):
        raise TypeError(f"the partitioner of variable {name!r} gives {given!r}, not integers")
    if len(counts) != len(lengths) or sum(n != 1 for n in counts) > 1:
        raise ValueError(
            f"the partitioner of variable {name!r} of shape {shape} gives {given!r}: it must give "
            "a number of parts for each axis, of which at most one is not 1, or one number alone"
        )
    axis = next((axis for axis, n in enumerate(counts) if n != 1), 0)
    count, length = int(counts[axis]), lengths[axis]
    if not 1 <= count <= max(length, 1):
        raise ValueError(
            f"the partitioner of variable {name!r} of shape {shape} gives {given!r}: {length} "
            f"cannot be divided into {count} parts"
        )
    short, more = divmod(length, count)
    ends = [number * short + min(number, more) for number in range(count + 1)]
    return [
        Part(shape, None if flat else axis, start, stop) for start, stop in itertools.pairwise(ends)
    ]


class Rows:
    """The positions of some rows of a variable in its parts.

    Args:
        parts: All parts of the variable.
        ids: Row numbers of the variable, valid, flat, int64.
    """

    def __init__(self, parts: Sequence[Part], ids: Array) -> None:
        shape, self._axis = parts[0].whole, parts[0].axis
        self.shape: Shape = (len(ids), *shape[1:])
        self._parts = parts
        self._ids = ids
        self._places: list[Any] = [slice(None)] * len(parts)
        self._inside = [ids] * len(parts)
        if self._axis is None:  # each element is a row of its own
            width = math.prod(shape[1:])
            self._ids = (ids[:, None] * width + np.arange(width)).reshape(-1)
        if not self._axis:
            for number, part in enumerate(parts):
                places = np.flatnonzero((self._ids >= part.start) & (self._ids < part.stop))
                self._places[number] = places
                self._inside[number] = self._ids[places] - part.start

    def inside(self, number: int) -> Array:
        """Return the row numbers within one part, in the order of ``ids``."""
        return self._inside[number]

    def shape_inside(self, number: int) -> Shape:
        """Return the shape of the rows within one part."""
        return (len(self._inside[number]), *self._parts[number].shape[1:])

    def take(self, rows: Array, number: int) -> Array:
        """Return the elements of all rows that belong to one part."""
        if self._axis:
            return self._columns(rows, number)
        source = rows.reshape(-1) if self._axis is None else rows
        own: Array = source[self._places[number]]
        return own

    def put(self, rows: Array, number: int, values: Array) -> None:
        """Write the elements of one part into ``rows``, a C-contiguous array of all rows."""
        if self._axis:
            self._columns(rows, number)[...] = values
        else:
            target = rows.reshape(-1) if self._axis is None else rows
            target[self._places[number]] = values

    def _columns(self, rows: Array, number: int) -> Array:
        part = self._parts[number]
        assert part.axis is not None
        columns: Array = rows[(*(slice(None),) * part.axis, slice(part.start, part.stop))]
        return columns
