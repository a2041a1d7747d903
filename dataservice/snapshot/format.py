"""The format of elements on disk, and the reader and writer of a chunk.

A chunk is a file of elements::

    head      magic, identity of the snapshot, stream, number of the chunk, checksum
    records   one for each element: length, kind, checksum; pickle, large arrays
    END       a record with the number of elements
    STATE     a record with the state of the iterator behind the chunk; its offset, magic

Everything is little-endian. Checksums are CRC-32. The file of a ``cache`` is one chunk of all
elements; see :mod:`dataservice.dataset.cache`.

A snapshot is a folder of chunks::

    metadata                          the description of the snapshot
    DONE                              numbers of elements of all chunks, once it is complete
    ERROR                             the reason why it never will be complete
    chunks/chunk_<stream>_<number>_<elements>
    streams/stream_<stream>/DONE      the number of chunks of the stream, once it is finished
    streams/stream_<stream>/attempt_<attempt>/   the uncommitted chunk of a writer

Every file gets its name by a rename, so it is complete. The STATE of a chunk is cut off when the
next chunk of the stream is committed.
"""

from __future__ import annotations

import os
import re
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, FileIO
from typing import Any, BinaryIO

import numpy as np

from dataservice.payload import Array, Compressor, pack_elements, unpack
from mpidist.errors import DataLossError, FailedPreconditionError

METADATA = "metadata"
DONE = "DONE"
ERROR = "ERROR"
CHUNKS = "chunks"

ELEMENT, END, STATE = 1, 2, 3

RECORD = struct.Struct("<QII")
"""Length of the body, kind, checksum of the two and the body."""
COUNT = struct.Struct("<Q")
TAIL = struct.Struct("<Q8s")

_MAGIC = b"mpidist1"
_HEAD = struct.Struct("<8s16sQQ")
_CRC = struct.Struct("<I")
_START = struct.Struct("<QI")
# Before a compressed body: its original size, or 0 if it is stored uncompressed.
_SIZE = struct.Struct("<Q")

# Arrays in a body begin at multiples of this, so that elements of any dtype are aligned in memory.
_ALIGNMENT = 16

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_CHUNK = re.compile(rf"chunk_{_NUMBER}_{_NUMBER}_{_NUMBER}")

Buffer = bytes | memoryview

# The buffer of a file that is read or written.
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class ChunkName:
    """The name of a chunk.

    Attributes:
        stream: The stream of the chunk.
        number: The index of the chunk in its stream.
        elements: The number of elements of the chunk.
    """

    stream: int
    number: int
    elements: int

    @classmethod
    def parse(cls, name: str) -> ChunkName:
        """Parse the result of ``str``.

        Raises:
            DataLossError: No chunk has such a name.
        """
        match = _CHUNK.fullmatch(name)
        if match is None:
            raise DataLossError(
                f"{name!r} is not the name of a chunk: remove it if it was copied there; "
                "otherwise the snapshot is damaged"
            )
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"chunk_{self.stream}_{self.number}_{self.elements}"

    def path(self, snapshot: str) -> str:
        """Return the path of the file, given the folder of the snapshot."""
        return os.path.join(snapshot, CHUNKS, str(self))


def stream_folder(snapshot: str, stream: int) -> str:
    """Return the folder of a stream."""
    return os.path.join(snapshot, "streams", f"stream_{stream}")


def head(identity: bytes, stream: int, number: int) -> bytes:
    """Return the first bytes of a chunk."""
    start = _HEAD.pack(_MAGIC, identity, stream, number)
    return start + _CRC.pack(zlib.crc32(start))


def tail(offset: int) -> bytes:
    """Return the last bytes of a chunk. The record of its state begins at ``offset``."""
    return TAIL.pack(offset, _MAGIC)


def state_offset(data: bytes) -> int | None:
    """Return the offset in the last bytes of a chunk; None if the chunk has no state."""
    offset, magic = TAIL.unpack(data)
    return int(offset) if magic == _MAGIC else None


def record(kind: int, body: Sequence[Buffer]) -> list[Buffer]:
    """Return a record in pieces."""
    length = sum(len(piece) for piece in body)
    return [RECORD.pack(length, kind, checksum(length, kind, body)), *body]


def checksum(length: int, kind: int, body: Sequence[Buffer]) -> int:
    """Return the checksum of a record."""
    crc = zlib.crc32(_START.pack(length, kind))
    for piece in body:
        crc = zlib.crc32(piece, crc)
    return crc


def pack_element(element: Any, compressor: Compressor | None) -> list[Buffer]:
    """Return the record of an element. Its body has the lengths of the parts, then the parts.

    Raises:
        Exception: The element cannot be pickled.
    """
    parcel = pack_elements([element])
    parts: list[Buffer] = [parcel.pickle, *(buffer.data for buffer in parcel.buffers)]
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    body = list(_padded([lengths, *parts]))
    if compressor is not None:
        whole = b"".join(body)
        small = compressor.compress(np.frombuffer(whole, np.uint8))
        body = [_SIZE.pack(0), whole] if small is None else [_SIZE.pack(len(whole)), small.data]
    return record(ELEMENT, body)


def unpack_element(body: Array, compressor: Compressor | None) -> Any:
    """Return the element of a record's body. Its large arrays are views of the body."""
    if compressor is not None:
        if len(body) < _SIZE.size:
            raise DataLossError(f"a compressed record of {len(body)} bytes is too short")
        (size,) = _SIZE.unpack_from(body.data)
        body = body[_SIZE.size :]
        # The copy aligns arrays of any dtype.
        body = compressor.decompress(body, size) if size else body.copy()
    (count,) = struct.unpack_from("<I", body.data)
    lengths = struct.unpack_from(f"<{count}Q", body.data, 4)
    start = _aligned(4 + 8 * count)
    parts: list[Array] = []
    for length in lengths:
        parts.append(body[start : start + length])
        start = _aligned(start + length)
    return unpack(parts[0].data, parts[1:])[0]


class ChunkWriter:
    """Writes one chunk.

    Args:
        file: A new file, which this object closes.
        head: The first bytes; see :func:`head`.

    Attributes:
        file: As given.
        elements: The number of elements.
    """

    def __init__(self, file: BinaryIO, head: bytes) -> None:
        self.file = file
        self.elements = 0
        file.write(head)

    def write(self, element: list[Buffer]) -> None:
        """Write an element's record; see :func:`pack_element`."""
        self._write(element)
        self.elements += 1

    def finish(self, state: bytes) -> None:
        """Write the end and the state, and force the file to the disk."""
        self._write(record(END, [COUNT.pack(self.elements)]))
        offset = self.file.tell()
        self._write([*record(STATE, [state]), tail(offset)])
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file. Idempotent."""
        # If the chunk is given up, it does not matter that the disk has no room for the buffer.
        with suppress(OSError):
            self.file.close()

    def _write(self, pieces: list[Buffer]) -> None:
        for piece in pieces:
            self.file.write(piece)


class ChunkReader:
    """Reads one chunk. It holds one element in memory, and a buffer.

    Args:
        path: The file.
        head: The expected first bytes; see :func:`head`.
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
        self._file = BufferedReader(FileIO(path), BUFFER_BYTES)
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
        if kind == END:
            self._check_end(start, body)
            self.position = start, self._count  # the next call ends in the same way
            raise StopIteration
        if kind != ELEMENT:
            raise self._damaged(start, f"there is a record of kind {kind}, not an element")
        try:
            element = unpack_element(body, self._compressor)
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
        self.position = max(self._size - TAIL.size, 0), self._count
        offset = state_offset(self._take(TAIL.size))
        if offset is None or offset > self._size:
            raise self._damaged(self._size, "there is no state at its end")
        self.position = offset, self._count
        kind, body = self._record()
        if kind != STATE:
            raise self._damaged(offset, f"there is a record of kind {kind}, not a state")
        return body.tobytes()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _record(self) -> tuple[int, Array]:
        start = self._offset
        length, kind, crc = RECORD.unpack(self._take(RECORD.size))
        if length > self._size - self._offset:  # checked before memory is allocated for it
            raise self._damaged(start, f"a record of {length} bytes goes beyond its end")
        body = np.empty(length, np.uint8)
        if self._file.readinto(body.data) != length:
            raise self._damaged(start, "it ends within a record")
        self._offset += length
        if checksum(length, kind, [body.data]) != crc:
            raise self._damaged(start, "a record has a wrong checksum")
        return kind, body

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise self._damaged(self._offset, "it is truncated")
        self._offset += size
        return data

    def _check_end(self, start: int, body: Array) -> None:
        recorded = COUNT.unpack(body.data)[0] if len(body) == COUNT.size else -1
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


def _padded(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    for part in parts:
        yield part
        if len(part) % _ALIGNMENT:
            yield bytes(-len(part) % _ALIGNMENT)


def _aligned(offset: int) -> int:
    return offset + -offset % _ALIGNMENT
