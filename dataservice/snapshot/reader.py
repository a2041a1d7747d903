"""Reading committed chunks."""

from __future__ import annotations

import os
from io import BufferedReader, FileIO
from typing import Any

import numpy as np

from dataservice.compression import Compressor
from dataservice.snapshot import frames
from dataservice.snapshot.layout import ChunkName, missing_chunk
from dataservice.snapshot.metadata import Metadata
from dataservice.wire import Array
from mpidist.errors import DataLossError, FailedPreconditionError

_BUFFER_BYTES = 1 << 20


class ChunkReader:
    """The elements of one chunk; holds one of them in memory, and a buffer.

    Args:
        snapshot: The folder of the snapshot.
        metadata: Of the snapshot.
        chunk: Which one.

    Attributes:
        chunk: As given.

    Raises:
        DataLossError: It is gone, damaged, or of another snapshot.
        FailedPreconditionError: It is compressed, and the package cramjam is not installed.
    """

    def __init__(self, snapshot: str, metadata: Metadata, chunk: ChunkName) -> None:
        self._compressor = Compressor(metadata.compression) if metadata.compression else None
        self.chunk = chunk
        self._path = chunk.path(snapshot)
        try:
            self._file = BufferedReader(FileIO(self._path), _BUFFER_BYTES)
        except FileNotFoundError as error:
            raise missing_chunk(snapshot, chunk.stream, chunk.number) from error
        self._size = os.fstat(self._file.fileno()).st_size
        self._place = 0
        self._given = 0
        try:
            self._check_head(frames.head(metadata.identity, chunk.stream, chunk.number))
        except DataLossError:
            self.close()
            raise

    @property
    def place(self) -> tuple[int, int]:
        """Local. Where the next element is, in bytes, and how many are before it; may be set."""
        return self._place, self._given

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self._place, self._given = place
        self._file.seek(self._place)

    def read(self) -> Any:
        """Local. The next element; StopIteration at the end.

        Raises:
            DataLossError: The record is damaged; the message names the file, and where in it.
            FailedPreconditionError: It cannot be unpickled here.
        """
        start = self._place
        kind, body = self._record()
        if kind == frames.END:
            self._check_end(start, body)
            self.place = start, self._given  # so that it ends again
            raise StopIteration
        if kind != frames.ELEMENT:
            raise self._damaged(start, f"there is a record of kind {kind}, not an element")
        try:
            element = frames.unpack_body(body, self._compressor)
        except Exception as error:
            raise FailedPreconditionError(
                f"cannot unpickle the element at byte {start} of {self._path!r}: {error!r}; "
                "install the same versions of the modules that the saver used"
            ) from error
        self._given += 1
        return element

    def state(self) -> bytes:
        """Local. The state of the pass that follows the chunk, if it is the last of its stream.

        Raises:
            DataLossError: It is not there, or damaged.
        """
        self.place = max(self._size - frames.TAIL.size, 0), self._given
        place = frames.place_of_state(self._take(frames.TAIL.size))
        if place is None or place > self._size:
            raise self._damaged(self._size, "there is no state at its end")
        self.place = place, self._given
        kind, body = self._record()
        if kind != frames.STATE:
            raise self._damaged(place, f"there is a record of kind {kind}, not a state")
        return body.tobytes()

    def close(self) -> None:
        """Local. Read no more; idempotent."""
        self._file.close()

    def _record(self) -> tuple[int, Array]:
        start = self._place
        length, kind, crc = frames.RECORD.unpack(self._take(frames.RECORD.size))
        if length > self._size - self._place:  # before there is memory for it
            raise self._damaged(start, f"a record of {length} bytes goes beyond its end")
        body = np.empty(length, np.uint8)
        if self._file.readinto(body.data) != length:
            raise self._damaged(start, "it ends within a record")
        self._place += length
        if frames.checksum(length, kind, [body.data]) != crc:
            raise self._damaged(start, "a record has a wrong checksum")
        return kind, body

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise self._damaged(self._place, "it is truncated")
        self._place += size
        return data

    def _check_head(self, head: bytes) -> None:
        if self._take(len(head)) != head:
            raise self._damaged(0, "its header belongs to another chunk")

    def _check_end(self, start: int, body: Array) -> None:
        told = frames.COUNT.unpack(body.data)[0] if len(body) == frames.COUNT.size else -1
        if not told == self._given == self.chunk.elements:
            raise self._damaged(
                start,
                f"it has {self._given} elements, but its end says {told} and its name "
                f"{self.chunk.elements}",
            )

    def _damaged(self, place: int, what: str) -> DataLossError:
        return DataLossError(
            f"the chunk {self._path!r} is damaged at byte {place}: {what}. Copy it from where it "
            "is whole, or save the dataset again"
        )
