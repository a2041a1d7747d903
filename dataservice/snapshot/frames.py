"""The format of a chunk.

::

    head      magic, identity of the snapshot, stream, number of the chunk, checksum
    records   one an element: length, kind, checksum; pickle, large arrays
    END       a record of the number of elements
    STATE     a record of the state of the pass behind the chunk; and where it begins, magic

What follows END is cut off when the next chunk of the stream is committed. Everything is
little-endian; checksums are CRC-32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dataservice.compression import Compressor
from dataservice.wire import Array, pack_elements, unpack
from mpidist.errors import DataLossError

ELEMENT, END, STATE = 1, 2, 3

RECORD = struct.Struct("<QII")
"""Length of the body, kind, checksum of these and the body."""
COUNT = struct.Struct("<Q")
TAIL = struct.Struct("<Q8s")

_MAGIC = b"mpidist1"
_HEAD = struct.Struct("<8s16sQQ")
_CRC = struct.Struct("<I")
_START = struct.Struct("<QI")
# Before a compressed body: its original size, or 0 if it is stored as it was.
_SIZE = struct.Struct("<Q")

# Arrays in a body begin at multiples of this, so that elements of any dtype are aligned in memory.
_ALIGNMENT = 16

Buffer = bytes | memoryview


def head(identity: bytes, stream: int, number: int) -> bytes:
    """Local. The first bytes of a chunk."""
    start = _HEAD.pack(_MAGIC, identity, stream, number)
    return start + _CRC.pack(zlib.crc32(start))


def tail(place: int) -> bytes:
    """Local. The last bytes of a chunk with a state; ``place`` is where its record begins."""
    return TAIL.pack(place, _MAGIC)


def place_of_state(data: bytes) -> int | None:
    """Local. The inverse of :func:`tail`; None if there is no state."""
    place, magic = TAIL.unpack(data)
    return int(place) if magic == _MAGIC else None


def record(kind: int, body: Sequence[Buffer]) -> list[Buffer]:
    """Local. A record, in pieces."""
    length = sum(len(piece) for piece in body)
    return [RECORD.pack(length, kind, checksum(length, kind, body)), *body]


def checksum(length: int, kind: int, body: Sequence[Buffer]) -> int:
    """Local. The checksum of a record."""
    crc = zlib.crc32(_START.pack(length, kind))
    for piece in body:
        crc = zlib.crc32(piece, crc)
    return crc


def pack(element: Any, compressor: Compressor | None) -> list[Buffer]:
    """Local. The body of an element's record: lengths of the parts, then the parts.

    Raises:
        Exception: The element cannot be pickled.
    """
    parcel = pack_elements([element])
    parts: list[Buffer] = [parcel.pickle, *(buffer.data for buffer in parcel.buffers)]
    lengths = struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts))
    body = list(_padded([lengths, *parts]))
    if compressor is None:
        return body
    whole = b"".join(body)
    small = compressor.compress(np.frombuffer(whole, np.uint8))
    return [_SIZE.pack(0), whole] if small is None else [_SIZE.pack(len(whole)), small.data]


def unpack_body(body: Array, compressor: Compressor | None) -> Any:
    """Local. The element of a record; its large arrays are views of the body."""
    if compressor is not None:
        if len(body) < _SIZE.size:
            raise DataLossError(f"a compressed record of {len(body)} bytes is too short")
        (size,) = _SIZE.unpack_from(body.data)
        body = body[_SIZE.size :]
        # Copied, so that arrays of any dtype are aligned.
        body = compressor.decompress(body, size) if size else body.copy()
    (count,) = struct.unpack_from("<I", body.data)
    lengths = struct.unpack_from(f"<{count}Q", body.data, 4)
    place = _after(4 + 8 * count)
    parts: list[Array] = []
    for length in lengths:
        parts.append(body[place : place + length])
        place = _after(place + length)
    return unpack(parts[0].tobytes(), parts[1:])[0]


def _padded(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    for part in parts:
        yield part
        if len(part) % _ALIGNMENT:
            yield bytes(-len(part) % _ALIGNMENT)


def _after(place: int) -> int:
    return place + -place % _ALIGNMENT
