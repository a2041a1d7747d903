"""The codec: how a message becomes frames, and frames become a message.

The first frame consists of a checksum, a fixed header, the size of each buffer (8 bytes each), the
method, the body, the failure, the acks (8 bytes each), and the buffers if they are small in total.
Large buffers follow as frames of their own. Or they
lie in shared memory, and the sizes are followed by their location there. All numbers are
little-endian. The header is no protobuf message, because creating, writing and reading one took
1.4 us, twice a request. The checksum covers all sizes, so that a receiver never waits for buffers
because of corrupt bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from google.protobuf.message import DecodeError

from mpidist.errors import type_name
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.rpc.message import Array, Message

_INLINE_BYTES = 16384  # buffers up to this total size travel in the first frame
_MAX_BODY_BYTES = 1 << 30

# Flags in the kind.
_IN_SHARED_MEMORY = 0x80
_HAS_OUTPUT_BUFFERS = 0x40

# Kind, receiver, sender, id; sizes of method, body and failure; number of acks and of numbers.
_HEADER = struct.Struct("<BIIQHIIII")
_NUMBER = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_CHECKED_HEADER = struct.Struct("<IBIIQHIIII")

# To look the dtype up by its name takes as long as to create an array.
UINT8: np.dtype[Any] = np.dtype(np.uint8)

Frame = bytes | bytearray | memoryview

Write = Callable[[Sequence[Array]], int | None]
"""Copies buffers to shared memory. Returns their location, or None if there is no room."""


class BadFrameError(ValueError):
    """The bytes are not a message."""


def encode(message: Message, write: Write | None = None) -> tuple[bytes, list[Array]]:
    """Return the first frame of a message, and the flat buffers that must follow it.

    Args:
        message: The message.
        write: Writes large buffers to shared memory. None lets them follow.

    Raises:
        ValueError: The body is larger than 1 GiB.
    """
    method, body = message.method.encode(), message.body
    if len(body) > _MAX_BODY_BYTES:
        raise ValueError(
            f"a body of {len(body)} bytes is more than a message can have: send it as a buffer"
        )
    kind, acks = message.kind, message.acks
    if message.has_output_buffers:
        kind |= _HAS_OUTPUT_BUFFERS
    failure = b"" if message.failure is None else message.failure.SerializeToString()
    numbers: list[int] = []
    inline = b""
    following: list[Array] = []
    buffers = message.buffers
    if buffers:
        numbers = [buffers[0].nbytes]
        if len(buffers) > 1:
            numbers = [array.nbytes for array in buffers]
        if sum(numbers) > _INLINE_BYTES:
            location = None if write is None else write(buffers)
            if location is None:
                following = [as_bytes(array) for array in buffers]
            else:
                kind |= _IN_SHARED_MEMORY
                numbers.append(location)
        elif len(buffers) == 1:
            inline = buffers[0].tobytes()
        else:
            inline = b"".join([array.tobytes() for array in buffers])
    header = _HEADER.pack(
        kind, message.receiver, message.sender, message.id,
        len(method), len(body), len(failure), len(acks), len(numbers),
    )  # fmt: skip
    if numbers:
        header += _pack_numbers(numbers)
    if acks:
        failure += _pack_numbers(acks)
    frame = (_CHECKSUM.pack(crc32(header)), header, method, body, failure, inline)
    return b"".join(frame), following


def decode(frame: Frame, peer: Any) -> tuple[Message, Sequence[int], int | None]:
    """Decode a first frame.

    Args:
        frame: Bytes of the frame. Buffers in it become views.
        peer: Value for ``Message.peer``.

    Returns:
        The message; the sizes in bytes of the buffers that are not in the frame; and the location
        of these in shared memory, or None.

    Raises:
        BadFrameError: The bytes are not a message.
    """
    try:
        checksum, kind, receiver, sender, request_id, method, body, failure, acks, numbers = (
            _CHECKED_HEADER.unpack_from(frame)
        )
    except struct.error:
        raise BadFrameError(f"{len(frame)} bytes are too few for a message") from None
    header_end = _CHECKED_HEADER.size + 8 * numbers
    method_end = header_end + method
    body_end = method_end + body
    start = body_end + failure + 8 * acks
    if start > len(frame):
        raise BadFrameError(f"a header of {start} bytes cannot be in {len(frame)}")
    if crc32(frame[_CHECKSUM.size : header_end]) != checksum:
        raise BadFrameError("its checksum is wrong")
    sizes: Sequence[int] = ()
    location, total = None, 0
    if numbers == 1:  # the usual case
        sizes = _NUMBER.unpack_from(frame, _CHECKED_HEADER.size)
        total = sizes[0]
    elif numbers:
        sizes = _read_numbers(frame, _CHECKED_HEADER.size, numbers)
        if kind & _IN_SHARED_MEMORY:
            kind ^= _IN_SHARED_MEMORY
            *sizes, location = sizes
        total = sum(sizes)
    inline = location is None and total <= _INLINE_BYTES
    end = start + total if inline else start
    if end != len(frame):
        raise BadFrameError(f"{len(frame)} bytes came in place of {end}")
    try:
        message = Message(
            kind & ~_HAS_OUTPUT_BUFFERS, request_id, receiver, sender,
            str(frame[header_end:method_end], "utf-8") if method else "",
            bytes(frame[method_end:body_end]) if body else b"",
            [], peer,
            Failure.FromString(bytes(frame[body_end : body_end + failure])) if failure else None,
            _read_numbers(frame, body_end + failure, acks) if acks else (),
            bool(kind & _HAS_OUTPUT_BUFFERS),
        )  # fmt: skip
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadFrameError(f"the header cannot be read: {error}") from None
    if not inline:
        return message, sizes, location
    if numbers == 1:
        message.buffers = [np.frombuffer(frame, UINT8, total, start)]
    elif numbers:
        message.buffers = split(frame, start, sizes)
    return message, (), None


def split(frame: Frame, start: int, sizes: Sequence[int]) -> list[Array]:
    """Return views of consecutive buffers."""
    buffers = []
    for size in sizes:
        buffers.append(np.frombuffer(frame, UINT8, size, start))
        start += size
    return buffers


def is_inline(buffers: Sequence[Array], nbytes: int = 0) -> bool:
    """Return True if buffers travel in the first frame.

    Args:
        buffers: The buffers.
        nbytes: Further bytes to count.
    """
    return sum([array.nbytes for array in buffers], nbytes) <= _INLINE_BYTES


def check_buffers(buffers: Sequence[Array]) -> Sequence[Array]:
    """Check that arrays can be sent, and return them.

    Raises:
        TypeError: The argument is not a list of NumPy arrays, or an array holds Python objects.
        ValueError: An array is not C-contiguous.
    """
    if isinstance(buffers, np.ndarray):
        raise TypeError("buffers must be a list of arrays, not one array: put it in brackets")
    for array in buffers:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"a buffer must be a NumPy array, not {type_name(array)}")
        if array.dtype.hasobject:
            raise TypeError(f"a buffer of dtype {array.dtype} holds Python objects")
        if not array.flags.c_contiguous:
            raise ValueError(
                f"a buffer must be C-contiguous, not {array.shape} with strides {array.strides}"
            )
    return buffers


def check_output_buffers(arrays: Sequence[Array]) -> None:
    """Check that arrays can receive buffers.

    Raises:
        TypeError: See :func:`check_buffers`.
        ValueError: See :func:`check_buffers`; also if an array is read-only.
    """
    for array in check_buffers(arrays):
        if not array.flags.writeable:
            raise ValueError(f"an array to receive into is read-only: shape {array.shape}")


def as_bytes(array: Array) -> Array:
    """Return the memory of a C-contiguous array as a flat uint8 view."""
    if array.ndim == 1 and array.dtype is UINT8 and array.flags.c_contiguous:
        return array
    check_buffers((array,))
    return array.reshape(-1).view(np.uint8)


def _pack_numbers(numbers: Sequence[int]) -> bytes:
    if len(numbers) == 1:  # the usual case
        return _NUMBER.pack(numbers[0])
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _read_numbers(frame: Frame, start: int, count: int) -> Sequence[int]:
    return struct.unpack_from(f"<{count}Q", frame, start)
