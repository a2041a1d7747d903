"""How a message becomes frames: one with the header and small buffers, then the large buffers.

The first frame is a checksum, a fixed part, the length of each buffer (8 bytes each), the method,
the body, the failure, the settled ids (8 bytes each), and the buffers if they are small, taken
together. Otherwise each buffer follows by itself, so that it is received straight into place; or
all lie in memory that the receiver can read, and behind their lengths comes where. All numbers are
little endian. The fixed part is no protobuf message because to make, write and read one
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

# In the kind: the buffers lie in the sender's shared memory.
_ELSEWHERE = 0x80
# The reply's buffers have arrays to go into.
_PLACED = 0x40

# Kind, receiver, sender, id; lengths of method, body and failure; how many are settled, and how
# many numbers follow.
_FIXED = struct.Struct("<BIIQHIIII")
_NUMBER = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<IBIIQHIIII")  # the checksum and the fixed part

Frame = bytes | bytearray | memoryview

Put = Callable[[Sequence[Array]], int | None]
"""Copies buffers to where the receiver can read them; says where, or None for no."""


class BadFrameError(ValueError):
    """Bytes that are no message; whoever sent them speaks another language."""


def pack(message: Message, put: Put | None = None) -> tuple[bytes, list[Array]]:
    """Local. The first frame of a message, and the flat buffers that follow it.

    Args:
        message: The message.
        put: See :data:`Put`; for large buffers. None lets them follow.
    """
    method, body = message.method.encode(), message.body
    kind, settled = message.kind, message.settled
    if message.placed:
        kind |= _PLACED
    failure = b"" if message.failure is None else message.failure.SerializeToString()
    numbers: list[int] = []
    inside = b""
    views: list[Array] = []
    buffers = message.buffers
    if buffers:
        numbers = [buffers[0].nbytes]
        if len(buffers) > 1:
            numbers = [array.nbytes for array in buffers]
        if sum(numbers) > _INLINE_BYTES:
            place = None if put is None else put(buffers)
            if place is None:
                views = [as_bytes(array) for array in buffers]
            else:
                kind |= _ELSEWHERE
                numbers.append(place)
        elif len(buffers) == 1:
            inside = buffers[0].tobytes()
        else:
            inside = b"".join([array.tobytes() for array in buffers])
    first = _FIXED.pack(
        kind, message.receiver, message.sender, message.id,
        len(method), len(body), len(failure), len(settled), len(numbers),
    )  # fmt: skip
    if numbers:
        first += _pack_numbers(numbers)
    if settled:
        failure += _pack_numbers(settled)
    frame = (_CHECKSUM.pack(crc32(first)), first, method, body, failure, inside)
    return b"".join(frame), views


def unpack(frame: Frame, peer: Any) -> tuple[Message, Sequence[int], int | None]:
    """Local. The message that a first frame begins.

    Args:
        frame: Its bytes; buffers in it become views of them.
        peer: Whom it came from.

    Returns:
        The message; the sizes in bytes of its buffers if these are not in the frame; and where
        they lie, None if they follow.

    Raises:
        BadFrameError: It is none.
    """
    try:
        checksum, kind, receiver, sender, identity, method, body, failure, settled, numbers = (
            _HEAD.unpack_from(frame)
        )
    except struct.error:
        raise BadFrameError(f"{len(frame)} bytes are too few for a message") from None
    head = _HEAD.size + 8 * numbers
    begin = head + method
    end = begin + body
    start = end + failure + 8 * settled
    if start > len(frame):
        raise BadFrameError(f"a header of {start} bytes cannot be in {len(frame)}")
    if crc32(frame[_CHECKSUM.size : head]) != checksum:
        raise BadFrameError("its checksum is wrong")
    sizes: Sequence[int] = ()
    place, total = None, 0
    if numbers == 1:  # as a rule
        sizes = _NUMBER.unpack_from(frame, _HEAD.size)
        total = sizes[0]
    elif numbers:
        sizes = _read_numbers(frame, _HEAD.size, numbers)
        if kind & _ELSEWHERE:
            kind ^= _ELSEWHERE
            *sizes, place = sizes
        total = sum(sizes)
    placed = bool(kind & _PLACED)
    here = place is None and total <= _INLINE_BYTES
    length = start + total if here else start
    if length != len(frame):
        raise BadFrameError(f"{len(frame)} bytes came in place of {length}")
    try:
        message = Message(
            kind & ~_PLACED, identity, receiver, sender,
            str(frame[head:begin], "utf-8") if method else "",
            bytes(frame[begin:end]) if body else b"",
            [], peer,
            Failure.FromString(bytes(frame[end : end + failure])) if failure else None,
            _read_numbers(frame, end + failure, settled) if settled else (),
            placed=placed,
        )  # fmt: skip
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadFrameError(f"the header cannot be read: {error}") from None
    if not here:
        return message, sizes, place
    if numbers == 1:
        message.buffers = [np.frombuffer(frame, UINT8, total, start)]
    elif numbers:
        message.buffers = split(frame, start, sizes)
    return message, (), None


def is_small(buffers: Sequence[Array]) -> bool:
    """Local. Whether buffers travel in the first frame."""
    return not buffers or sum([array.nbytes for array in buffers]) <= _INLINE_BYTES


def split(frame: Frame, start: int, sizes: Sequence[int]) -> list[Array]:
    """Local. Views of buffers that lie one behind the other."""
    buffers = []
    for size in sizes:
        buffers.append(np.frombuffer(frame, UINT8, size, start))
        start += size
    return buffers


def _pack_numbers(numbers: Sequence[int]) -> bytes:
    if len(numbers) == 1:  # as a rule
        return _NUMBER.pack(numbers[0])
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _read_numbers(frame: Frame, start: int, count: int) -> Sequence[int]:
    return struct.unpack_from(f"<{count}Q", frame, start)
