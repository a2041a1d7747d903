"""What both sides of a tcp connection share: sockets, hellos, and frames."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from google.protobuf.message import DecodeError

from mpidist.config import distribution_version
from mpidist.endpoint.frames import BadFrameError, pack, unpack
from mpidist.endpoint.message import REPLY, Array, Message
from mpidist.errors import OpError
from mpidist.proto.mpidist_pb2 import Failure, Hello

# Of the messages and frames; raised by a change that the other side would not understand.
PROTOCOL = 2

# How long a broken connection may take to come back before its other end counts as lost.
GRACE_S = 5.0

_LINGER_MS = 2000
_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000
# The kernel asks a host that does not answer less and less often; we must hear of its return soon.
_CONNECT_MS = 1000
# Larger buffers are cut: ZeroMQ takes a frame that needs longer than that for a dead network.
_PIECE_BYTES = 16 << 20

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Local. Have the C library keep what it frees, up to 256 MiB, instead of giving it back.

    ZeroMQ allocates memory for each message that arrives; as pages that the system has to make
    anew, large ones took up to twice as long. A library without such a choice is left as it is.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is not None:
        choose(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        choose(_M_MMAP_THRESHOLD, 2 * _PIECE_BYTES)  # the largest that it allows


def new_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    """Local. A socket that notices a dead network, and drops nothing by itself."""
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = _LINGER_MS
    # What is on its way is bounded by what callers wait for.
    socket.sndhwm = socket.rcvhwm = 0
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _SILENCE_MS
    socket.connect_timeout = _CONNECT_MS
    socket.ipv6 = False
    return socket


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Local. Whether a message can be received without waiting."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def hello_message(kind: int, process: bytes) -> Message:
    """Local. A HELLO or WELCOME of this process."""
    hello = Hello(protocol=PROTOCOL, version=distribution_version(), process=process)
    return Message(kind, body=hello.SerializeToString())


def hello_of(message: Message) -> Hello:
    """Local. What a HELLO or WELCOME says.

    Raises:
        BadFrameError: It cannot be read.
    """
    try:
        return Hello.FromString(message.body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadFrameError(f"the hello cannot be read: {error}") from None


def failed(request: Message, error: OpError) -> Message:
    """Local. The reply to a request that cannot be taken."""
    failure = Failure(code=error.code, message=error.message)
    return Message(REPLY, request.id, request.sender, failure=failure)


def frames_of(message: Message) -> list[bytes | memoryview]:
    """Local. What a message is sent as."""
    first, views = pack(message)
    pieces = [
        view[start : start + _PIECE_BYTES] for view in views for start in _starts(view.nbytes)
    ]
    return [first, *(piece.data for piece in pieces)]


def array_of(frame: zmq.Frame) -> Array:
    """Local. A received frame as flat uint8, without a copy."""
    return np.frombuffer(frame.buffer, np.uint8) if len(frame) else np.empty(0, np.uint8)


def message_of(frames: Sequence[zmq.Frame], peer: Any) -> Message:
    """Local. The message that frames make; large buffers may be cut.

    Args:
        frames: At least one; buffers become views of them.
        peer: Whom they came from.

    Raises:
        BadFrameError: They make none.
    """
    message, sizes, place = unpack(frames[0].buffer, peer)
    if place is not None:
        raise BadFrameError("its buffers are said to lie in shared memory")
    here = [len(frame) for frame in frames[1:]]
    # No endless list for absurd sizes.
    if sum(here) != sum(sizes) or here != _pieces_of(sizes):
        raise BadFrameError(f"buffers of {here} bytes came in place of {list(sizes)}")
    if sizes:
        rest = iter([array_of(frame) for frame in frames[1:]])
        message.buffers = [_joined([next(rest) for _ in _starts(size)]) for size in sizes]
    return message


def _pieces_of(sizes: Sequence[int]) -> list[int]:
    return [min(size - start, _PIECE_BYTES) for size in sizes for start in _starts(size)]


def _starts(nbytes: int) -> range:
    """Where the pieces of a buffer begin; one that is empty is one piece."""
    return range(0, max(nbytes, 1), _PIECE_BYTES)


def _joined(pieces: list[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
