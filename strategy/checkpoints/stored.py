"""Arrays in the files of checkpoints, read slice by slice."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from strategy.shared.parts import Part
from strategy.shared.push_message import SLICE_BYTES
from strategy.shared.shard import BLOCK_BYTES

Array = NDArray[Any]

Reader = Callable[[Array, int], None]
"""Fills a flat array with the elements of a stored array, from an index on."""

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Stored:
    """A flat array in the files of a checkpoint.

    Attributes:
        size: Number of elements.
        dtype: The dtype.
        read: Reads some of the elements. Raises DataLossError if a file is damaged.
    """

    size: int
    dtype: np.dtype[Any]
    read: Reader

    def slices(self) -> list[tuple[int, int]]:
        """Return the first and last index of each slice; see :data:`SLICE_BYTES`."""
        step = SLICE_BYTES // self.dtype.itemsize
        starts = range(0, max(self.size, 1), step)  # an empty array has one slice
        return [(start, min(start + step, self.size)) for start in starts]

    def part(self, start: int, stop: int) -> Array:
        """Read the elements from one index to another."""
        values = np.empty(stop - start, self.dtype)
        self.read(values, start)
        return values


def tensors_in(path: str) -> dict[str, tuple[int, int]]:
    """Return the first and the last offset of each tensor of a safetensors file, by name.

    The file begins with the length of a JSON text, in 8 bytes, and the text. The text has offsets
    from its own end.
    """
    with open(path, "rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        described: dict[str, Any] = json.loads(file.read(length))
    base = _LENGTH.size + length
    return {
        name: (base + one["data_offsets"][0], base + one["data_offsets"][1])
        for name, one in described.items()
        if name != "__metadata__"
    }


def read_into(out: Array, path: str, start: int) -> None:
    """Fill an array with the bytes of a file from an offset on. The file is not mapped.

    Raises:
        DataLossError: The file cannot be read, or is too short.
    """
    view = out.view(np.uint8).data  # of NumPy's bfloat16 there is none
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while view.nbytes and (count := file.readinto(view)):
                view = view[count:]
    except OSError as error:
        raise unreadable(path, error) from error
    if view.nbytes:
        raise unreadable(path, "it has become shorter")


def unreadable(path: str, why: object) -> errors.DataLossError:
    """Return the error for a file of a checkpoint that cannot be read."""
    return errors.DataLossError(
        f"cannot read {path!r} of a checkpoint ({why}); restore an older one"
    )


def joined(part: Part, sources: Sequence[tuple[Part, Reader]]) -> Reader:
    """Return a reader of a part of a variable, made of readers of other parts along the same axis.

    A part is read as a table with one row for each index before the axis. Each source has adjacent
    columns of the table.
    """
    inner = 1 if part.axis is None else math.prod(part.whole[part.axis + 1 :])
    width = (part.stop - part.start) * inner
    places = [
        ((source.start - part.start) * inner, (source.stop - part.start) * inner, read)
        for source, read in sources
    ]

    def read(out: Array, first: int) -> None:
        for row, column, table in _rectangles(out, first, width):
            for start, stop, source in places:
                low, high = max(start, column), min(stop, column + table.shape[1])
                if low < high:
                    target = table[:, low - column : high - column]
                    _read_columns(target, source, stop - start, row, low - start)

    return read


def _rectangles(flat: Array, first: int, width: int) -> Iterator[tuple[int, int, Array]]:
    """Divide elements of a table into rectangles: the end of a row, whole rows, the start of a row.

    Yields:
        The first row, the first column, and the elements of a rectangle.
    """
    place = 0
    while place < flat.size:
        row, column = divmod(first + place, width)
        rows = 1 if column else max((flat.size - place) // width, 1)
        count = min(rows * width - column, flat.size - place)
        yield row, column, flat[place : place + count].reshape(rows, -1)
        place += count


def _read_columns(target: Array, read: Reader, width: int, row: int, column: int) -> None:
    """Fill a table from a wider table, beginning at a row and a column of the wider table."""
    rows, count = target.shape
    step = BLOCK_BYTES // (width * target.itemsize)
    if rows == 1 or step <= 1:
        for number, values in enumerate(target, row):
            read(values, number * width + column)
        return
    for begin in range(0, rows, step):
        here = target[begin : begin + step]
        table = np.empty((len(here), width), target.dtype)
        read(table.reshape(-1), (row + begin) * width)
        here[...] = table[:, column : column + count]
