"""Files of checkpoints that a server does not see, for want of a shared file system, in pieces."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors

Bytes = NDArray[np.uint8]
Stretch = tuple[int, int, int]
"""Of a file: its index among the checkpoint's, and the first byte and the one behind the last."""

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
        raise errors.DataLossError(
            f"cannot read {path!r} of a checkpoint ({error}); restore an older one"
        ) from error
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
