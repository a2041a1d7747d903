"""The format of elements on disk.

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
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.payload import Array, Compressor, pack_elements, unpack
from mpidist.errors import DataLossError

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


def _padded(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    for part in parts:
        yield part
        if len(part) % _ALIGNMENT:
            yield bytes(-len(part) % _ALIGNMENT)


def _aligned(offset: int) -> int:
    return offset + -offset % _ALIGNMENT
