"""How a message becomes frames: one with the header and small buffers, then the large buffers.

The first frame is a checksum, a fixed part, the length of each buffer (8 bytes each), the method,
the body, the failure, the settled ids (8 bytes each), and the buffers if they are small, taken
together. Otherwise each buffer follows by itself, so that it is received straight into place. All
numbers are little endian. The fixed part is no protobuf message because to make, write and read one
took 1.4 us, twice a request. The checksum is of all lengths: nobody must wait for buffers because
of bytes that are no message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from google.protobuf.message import DecodeError

from mpidist.endpoint.message import UINT8, Array, Message, as_bytes
from mpidist.proto.mpidist_pb2 import Failure

_INLINE_BYTES = 16384

# Kind, receiver, sender, id; lengths of method, body and failure; numbers of settled and buffers.
_FIXED = struct.Struct("<BIIQHIIII")
_NUMBER = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<IBIIQHIIII")  # the checksum and the fixed part

Frame = bytes | bytearray | memoryview

IntoOf = Callable[[Message, Sequence[int]], Sequence[Array] | None]
"""Given a message and the sizes of its buffers, arrays of these sizes to receive them; or None."""


class BadFrameError(ValueError):
    """Bytes that are no message; whoever sent them speaks another language."""


def pack(message: Message) -> tuple[bytes, list[Array]]:
    """Local. The first frame of a message, and the flat buffers that follow it."""
    method, body = message.method.encode(), message.body
    settled, buffers = message.settled, message.buffers
    failure = b"" if message.failure is None else message.failure.SerializeToString()
    first = _FIXED.pack(
        message.kind, message.receiver, message.sender, message.id,
        len(method), len(body), len(failure), len(settled), len(buffers),
    )  # fmt: skip
    if settled:
        failure += _numbers(settled)
    if not buffers:
        return b"".join((_CHECKSUM.pack(crc32(first)), first, method, body, failure)), []
    if len(buffers) == 1 and buffers[0].nbytes <= _INLINE_BYTES:  # as a rule
        first += _NUMBER.pack(buffers[0].nbytes)
        head = (_CHECKSUM.pack(crc32(first)), first, method, body, failure)
        return b"".join((*head, buffers[0].tobytes())), []
    sizes = [array.nbytes for array in buffers]
    first += _numbers(sizes)
    head = (_CHECKSUM.pack(crc32(first)), first, method, body, failure)
    if sum(sizes) > _INLINE_BYTES:
        return b"".join(head), [as_bytes(array) for array in buffers]
    return b"".join((*head, *[array.tobytes() for array in buffers])), []


def unpack(
    frame: Frame, peer: Any, into_of: IntoOf | None = None
) -> tuple[Message, Sequence[int]]:
    """Local. The message that a first frame begins.

    Args:
        frame: Its bytes; buffers in it become views of them.
        peer: Whom it came from.
        into_of: Where buffers in it are copied to instead, if anywhere.

    Returns:
        The message, and the sizes in bytes of the buffers that are still to follow, if any.

    Raises:
        BadFrameError: It is none.
    """
    try:
        checksum, kind, receiver, sender, identity, method, body, failure, settled, buffers = (
            _HEAD.unpack_from(frame)
        )
    except struct.error:
        raise BadFrameError(f"{len(frame)} bytes are too few for a message") from None
    head = _HEAD.size + 8 * buffers
    begin = head + method
    end = begin + body
    start = end + failure + 8 * settled
    if start > len(frame):
        raise BadFrameError(f"a header of {start} bytes cannot be in {len(frame)}")
    if crc32(frame[_CHECKSUM.size : head]) != checksum:
        raise BadFrameError("its checksum is wrong")
    sizes = _read_numbers(frame, _HEAD.size, buffers) if buffers else ()
    total = sum(sizes) if buffers else 0
    here = total <= _INLINE_BYTES
    length = start + total if here else start
    if length != len(frame):
        raise BadFrameError(f"{len(frame)} bytes came in place of {length}")
    try:
        message = Message(
            kind, identity, receiver, sender,
            str(frame[head:begin], "utf-8") if method else "",
            bytes(frame[begin:end]) if body else b"",
            [], peer,
            Failure.FromString(bytes(frame[end : end + failure])) if failure else None,
            _read_numbers(frame, end + failure, settled) if settled else (),
        )  # fmt: skip
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadFrameError(f"the header cannot be read: {error}") from None
    if not here:
        return message, sizes
    if sizes:
        message.buffers = _split(frame, start, sizes)
        into = None if into_of is None else into_of(message, sizes)
        if into is not None:
            message.buffers = fill(into, message.buffers)
    return message, ()


def fill(into: Sequence[Array], buffers: Sequence[Array]) -> Sequence[Array]:
    """Local. Copy received buffers into arrays of the same sizes; returns those."""
    for index, target in enumerate(into):
        as_bytes(target)[:] = buffers[index]
    return into


def _numbers(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _read_numbers(frame: Frame, start: int, count: int) -> Sequence[int]:
    if count == 1:  # as a rule
        return _NUMBER.unpack_from(frame, start)
    return struct.unpack_from(f"<{count}Q", frame, start)


def _split(frame: Frame, start: int, sizes: Sequence[int]) -> list[Array]:
    if len(sizes) == 1:  # as a rule
        return [np.frombuffer(frame, UINT8, sizes[0], start)]
    buffers = []
    for size in sizes:
        buffers.append(np.frombuffer(frame, UINT8, size, start))
        start += size
    return buffers
