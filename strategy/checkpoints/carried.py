"""Files of checkpoints in pieces: as they are carried, and as arrays are read from them.

They are carried where a server does not see a folder, for want of a shared file system. Arrays are
read straight to where they belong, or by way of some MiB: a server has no room for them twice.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from strategy.shared.parts import Part
from strategy.shared.shard import BLOCK_BYTES

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Stretch = tuple[int, int, int]
"""Of a file: its index among the checkpoint's, and the first byte and the one behind the last."""

Reader = Callable[[Array, int], None]
"""Fills a flat array with the elements of another one, in their order, from a place on."""

PIECE_BYTES = 8 << 20
_LENGTH = struct.Struct("<Q")


class SavedPart:
    """Local. A file that a server has written for a worker to fetch; it has no name.

    Args:
        write: Writes it, given a path.

    Attributes:
        nbytes: Its length.

    Raises:
        FailedPreconditionError: It cannot be written.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="mpidist-save-") as folder:
            path = os.path.join(folder, "part")
            try:
                write(path)
            except errors.FailedPreconditionError as error:
                raise errors.FailedPreconditionError(
                    f"{error.message}. This ps task does not see that folder, and writes to one of "
                    "its own first; TMPDIR names another place for it"
                ) from error
            self._file = open(path, "rb")  # noqa: SIM115 - until close()
        self.nbytes = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, stop: int) -> Bytes:
        """Local. Some of its bytes; a copy."""
        piece = np.empty(stop - start, np.uint8)
        self._file.seek(start)
        if self._file.readinto(piece.data) < piece.size:
            raise errors.DataLossError(f"a checkpoint's part has no bytes {start} to {stop}")
        return piece

    def close(self) -> None:
        """Local. Forget it."""
        self._file.close()


class Mirror:
    """Local. The files of a checkpoint, as far as they have been carried here; they have no names.

    Only what is needed of them is: first their heads, then the tensors of the server's variables.

    Args:
        names: Of the files.
        folder: Of the checkpoint, for messages.
    """

    def __init__(self, names: Sequence[str], folder: str) -> None:
        self._files = [tempfile.TemporaryFile() for _ in names]  # noqa: SIM115 - until close()
        self._real = [os.path.join(folder, name) for name in names]
        self._folder = folder
        self._ends: dict[tuple[int, int], int] = {}  # of what has come, by file and start
        self.paths = [f"/proc/self/fd/{file.fileno()}" for file in self._files]

    def put(self, file: int, size: int, start: int, piece: Bytes) -> None:
        """Local. Take some bytes of a file.

        Args:
            file: Its index.
            size: Of the whole file.
            start: Where the bytes belong.
            piece: These.

        Raises:
            FailedPreconditionError: There is no room for them.
        """
        descriptor = self._files[file].fileno()
        try:
            os.truncate(descriptor, size)
            view = piece.data
            while view.nbytes:
                written = os.pwrite(descriptor, view, start)
                self._ends[file, start] = start + written
                start, view = start + written, view[written:]
        except OSError as error:
            raise errors.FailedPreconditionError(
                f"there is no room in {tempfile.gettempdir()!r} for what is restored from "
                f"{self._folder!r}, which this ps task does not see: {error}; TMPDIR names another "
                "place"
            ) from error

    def missing(self, stretches: Iterable[Stretch]) -> list[Stretch]:
        """Local. Those of some stretches that have not all been taken."""
        return [one for one in stretches if not self._has(one)]

    def in_words(self, text: str) -> str:
        """Local. A message with the names that files have where they come from."""
        for path, real in zip(self.paths, self._real, strict=True):
            text = text.replace(repr(path), repr(real))
        return text.replace(repr("/proc/self/fd"), repr(self._folder))

    def close(self) -> None:
        """Local. Forget all of it."""
        for file in self._files:
            file.close()

    def _has(self, stretch: Stretch) -> bool:
        file, place, stop = stretch
        while place < stop and (file, place) in self._ends:
            place = self._ends[file, place]
        return place >= stop


@dataclass(frozen=True)
class Stored:
    """An array, flat, in the files of a checkpoint.

    Attributes:
        size: Number of elements.
        dtype: Of these.
        read: Reads some of them; DataLossError if a file has been damaged since it was found.
    """

    size: int
    dtype: np.dtype[Any]
    read: Reader

    def fill(self, out: Array) -> None:
        """Local. Read all of it into an array of its size and dtype."""
        step = BLOCK_BYTES // self.dtype.itemsize
        for start in range(0, self.size, step):
            self.read(out[start : start + step], start)

    def blocks(self) -> Iterator[Array]:
        """Local. Read it as blocks of a shard.

        Yields:
            Flat arrays; each is overwritten by the next.
        """
        step = BLOCK_BYTES // self.dtype.itemsize
        memory = np.empty(min(self.size, step), self.dtype)
        for start in range(0, max(self.size, 1), step):
            block = memory[: self.size - start]
            self.read(block, start)
            yield block


def head_of(path: str) -> tuple[int, int]:
    """Local. Length of the head of a safetensors file, and of the file; see :func:`tensors_in`.

    Raises:
        DataLossError: It is missing or damaged.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    except (OSError, struct.error) as error:
        raise unreadable(path, error) from error
    return min(_LENGTH.size + length, size), size


def tensors_in(path: str) -> dict[str, tuple[int, int]]:
    """Local. Where the tensors of a safetensors file lie in it, from its head alone.

    The head is the length of a JSON text, in 8 bytes, and the text; tensors follow at the places
    that it names, counted from its end.
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


def pieces_of(path: str, start: int, stop: int) -> Iterable[tuple[int, Bytes]]:
    """Local. The bytes of a file from a place to another, in pieces with the place of each."""
    for first in range(start, stop, PIECE_BYTES):
        yield first, np.fromfile(path, np.uint8, min(PIECE_BYTES, stop - first), offset=first)


def read_into(out: Array, path: str, start: int) -> None:
    """Local. Fill an array with the bytes of a file from a place on; it is not mapped.

    Raises:
        DataLossError: They cannot be read, or are not there.
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
    """Local. What to raise where a file of a checkpoint cannot be read."""
    return errors.DataLossError(
        f"cannot read {path!r} of a checkpoint ({why}); restore an older one"
    )


def joined(part: Part, sources: Sequence[tuple[Part, Reader]]) -> Reader:
    """Local. What reads a part of a variable, given what reads stretches along the same axis.

    They are tables of as many rows as there are indices before the axis. Of the part's columns,
    each source has some that are next to each other, and perhaps others.
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
    """Elements of a table from a place on, as tables: the end of a row, whole rows, a beginning.

    Yields:
        The first row, the first column, and the elements.
    """
    place = 0
    while place < flat.size:
        row, column = divmod(first + place, width)
        rows = 1 if column else max((flat.size - place) // width, 1)
        count = min(rows * width - column, flat.size - place)
        yield row, column, flat[place : place + count].reshape(rows, -1)
        place += count


def _read_columns(target: Array, read: Reader, width: int, row: int, column: int) -> None:
    """Fill a table from a wider one, from a row and a column of that on."""
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
