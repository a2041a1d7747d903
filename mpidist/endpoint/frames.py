"""How a message becomes frames: one with the header and small buffers, then the large buffers.

The first frame is the length of the header (4 bytes, little endian), the header, and the buffers
if they are small, taken together. Otherwise each buffer follows by itself, so that it is received
straight into place.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from mpidist.endpoint.message import Array, Message, as_bytes
from mpidist.proto.mpidist_pb2 import Header

_INLINE_BYTES = 16384
_LENGTH = struct.Struct("<I")


class BadFrameError(ValueError):
    """Bytes that are no message; whoever sent them speaks another language."""


def pack(message: Message) -> tuple[bytes, list[Array]]:
    """Local. The first frame of a message, and the flat buffers that follow it."""
    header = message.header.SerializeToString()
    if not message.buffers:
        return _LENGTH.pack(len(header)) + header, []
    views = [as_bytes(array) for array in message.buffers]
    if sum([view.nbytes for view in views]) > _INLINE_BYTES:
        return _LENGTH.pack(len(header)) + header, views
    return b"".join((_LENGTH.pack(len(header)), header, *[view.data for view in views])), []


def unpack(frame: memoryview) -> tuple[Header, list[Array] | None]:
    """Local. The header in a first frame, and the buffers in it; None if they follow.

    Args:
        frame: Its bytes; the buffers are views of them.

    Raises:
        BadFrameError: It is none.
    """
    if len(frame) < _LENGTH.size:
        raise BadFrameError(f"{len(frame)} bytes are too few for a message")
    start = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
    if start > len(frame):
        raise BadFrameError(f"a header of {start - _LENGTH.size} bytes cannot be in {len(frame)}")
    try:
        header = Header.FromString(frame[_LENGTH.size : start].tobytes())
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadFrameError(f"the header cannot be read: {error}") from None
    buffers: list[Array] = []
    if header.sizes:
        if sum(header.sizes) > _INLINE_BYTES:
            if start != len(frame):
                raise BadFrameError("buffers came where none should be")
            return header, None
        rest = np.frombuffer(frame, np.uint8)
        for size in header.sizes:
            buffers.append(rest[start : start + size])
            start += size
    if start != len(frame):
        raise BadFrameError(f"{len(frame)} bytes came in place of {start}")
    return header, buffers


def fill(into: Sequence[Array], buffers: Sequence[Array]) -> Sequence[Array]:
    """Local. Copy received buffers into arrays of the same sizes; returns those."""
    for target, data in zip(into, buffers, strict=True):
        np.copyto(as_bytes(target), data)
    return into
