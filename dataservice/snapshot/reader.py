"""Read the elements of a chunk."""

from __future__ import annotations

import os
import weakref
from io import BufferedReader, FileIO
from typing import Any

import numpy as np

from dataservice.payload import Array, Compressor
from dataservice.snapshot import format
from dataservice.snapshot.format import ChunkName
from dataservice.snapshot.metadata import Metadata, missing_chunk
from mpidist.errors import DataLossError, FailedPreconditionError

_BUFFER_BYTES = 1 << 20


class ChunkReader:
    """Reads one chunk. It holds one element in memory, and a buffer.

    Args:
        path: The file.
        head: The expected first bytes; see :func:`dataservice.snapshot.format.head`.
        elements: The expected number of elements; None if it is not known.
        codec: The codec of the records; None for no compression.
        remedy: The advice in errors about damage.

    Raises:
        DataLossError: The chunk is damaged, or belongs to another snapshot.
        FailedPreconditionError: It is compressed, and the package cramjam is not installed.
        FileNotFoundError: The file does not exist.
    """

    def __init__(
        self, path: str, head: bytes, elements: int | None, codec: str | None, remedy: str
    ) -> None:
        self._compressor = Compressor(codec) if codec else None
        self._elements = elements
        self._path = path
        self._remedy = remedy
        self._file = BufferedReader(FileIO(path), _BUFFER_BYTES)
        # An iterator that ends by an error may never be closed.
        weakref.finalize(self, self._file.close).atexit = False
        self._size = os.fstat(self._file.fileno()).st_size
        self._offset = 0
        self._count = 0
        try:
            if self._take(len(head)) != head:
                raise self._damaged(0, "its header belongs to another chunk")
        except DataLossError:
            self.close()
            raise

    @property
    def position(self) -> tuple[int, int]:
        """The offset of the next element in bytes, and the number of elements before it."""
        return self._offset, self._count

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        offset, self._count = position
        if offset != self._offset:
            self._file.seek(offset)
            self._offset = offset

    def read(self) -> Any:
        """Return the next element.

        Raises:
            DataLossError: The record is damaged. The message has the file and the offset.
            FailedPreconditionError: The element cannot be unpickled here.
            StopIteration: There is none.
        """
        start = self._offset
        kind, body = self._record()
        if kind == format.END:
            self._check_end(start, body)
            self.position = start, self._count  # the next call ends in the same way
            raise StopIteration
        if kind != format.ELEMENT:
            raise self._damaged(start, f"there is a record of kind {kind}, not an element")
        try:
            element = format.unpack_element(body, self._compressor)
        except Exception as error:
            raise FailedPreconditionError(
                f"cannot unpickle the element at byte {start} of {self._path!r}: {error!r}; "
                "install the same versions of the modules that the saver used"
            ) from error
        self._count += 1
        return element

    def state(self) -> bytes:
        """Return the state at the end of the chunk. The last chunk of a stream has one.

        Raises:
            DataLossError: The state is missing or damaged.
        """
        self.position = max(self._size - format.TAIL.size, 0), self._count
        offset = format.state_offset(self._take(format.TAIL.size))
        if offset is None or offset > self._size:
            raise self._damaged(self._size, "there is no state at its end")
        self.position = offset, self._count
        kind, body = self._record()
        if kind != format.STATE:
            raise self._damaged(offset, f"there is a record of kind {kind}, not a state")
        return body.tobytes()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _record(self) -> tuple[int, Array]:
        start = self._offset
        length, kind, crc = format.RECORD.unpack(self._take(format.RECORD.size))
        if length > self._size - self._offset:  # checked before memory is allocated for it
            raise self._damaged(start, f"a record of {length} bytes goes beyond its end")
        body = np.empty(length, np.uint8)
        if self._file.readinto(body.data) != length:
            raise self._damaged(start, "it ends within a record")
        self._offset += length
        if format.checksum(length, kind, [body.data]) != crc:
            raise self._damaged(start, "a record has a wrong checksum")
        return kind, body

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise self._damaged(self._offset, "it is truncated")
        self._offset += size
        return data

    def _check_end(self, start: int, body: Array) -> None:
        recorded = format.COUNT.unpack(body.data)[0] if len(body) == format.COUNT.size else -1
        if recorded == self._count and self._elements in (None, recorded):
            return
        message = f"it has {self._count} elements, but its end says {recorded}"
        if self._elements is not None:
            message += f" and its name {self._elements}"
        raise self._damaged(start, message)

    def _damaged(self, offset: int, problem: str) -> DataLossError:
        return DataLossError(
            f"the chunk {self._path!r} is damaged at byte {offset}: {problem}. {self._remedy}"
        )


def open_chunk(snapshot: str, metadata: Metadata, chunk: ChunkName) -> ChunkReader:
    """Open a chunk of a snapshot.

    Args:
        snapshot: The folder of the snapshot.
        metadata: The description of the snapshot.
        chunk: The chunk.

    Raises:
        DataLossError: The chunk is missing, damaged, or belongs to another snapshot.
        FailedPreconditionError: It is compressed, and the package cramjam is not installed.
    """
    try:
        return ChunkReader(
            chunk.path(snapshot),
            format.head(metadata.identity, chunk.stream, chunk.number),
            chunk.elements,
            metadata.compression,
            "Copy it from where it is whole, or save the dataset again",
        )
    except FileNotFoundError as error:
        raise missing_chunk(snapshot, chunk.stream, chunk.number) from error
