"""What both sides of a tcp connection share: sockets, hellos, and frames."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import zmq
from google.protobuf.message import DecodeError

from mpidist.config import distribution_version
from mpidist.endpoint.frames import BadFrameError, Put, pack, unpack
from mpidist.endpoint.message import REPLY, Array, Message
from mpidist.errors import FailedPreconditionError, OpError
from mpidist.proto.mpidist_pb2 import Failure, Hello, Memory

# Of the messages and frames; raised by a change that the other side would not understand.
PROTOCOL = 3

Take = Callable[[int, Sequence[int]], list[Array]]
"""Gives the buffers of some sizes that lie somewhere in shared memory; BadFrameError if not."""

# How long a broken connection may take to come back before its other end counts as lost.
GRACE_S = 5.0

_LINGER_MS = 2000
_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000
# The kernel asks a host that does not answer less and less often; we must hear of its return soon.
_CONNECT_MS = 1000
# Larger buffers are cut: ZeroMQ takes a frame that needs longer than that for a dead network.
_PIECE_BYTES = 16 << 20

_NO_HELLO = "this connection has not said hello"

# As plain numbers: to combine pyzmq's enumerations takes longer than to ask ZeroMQ.
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)
_MORE = int(zmq.SNDMORE)
_NOW = int(zmq.NOBLOCK)

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
    return cast("int", socket.getsockopt(_EVENTS)) & _READABLE != 0


def send_frames(socket: zmq.Socket[Any], frames: Sequence[bytes | memoryview]) -> None:
    """Local. Send frames as one message; large ones are not copied.

    Raises:
        zmq.Again: There is nobody to send to.
    """
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        socket.send(frame, _NOW if number == last else _NOW | _MORE, copy=False)


def receive_frames(socket: zmq.Socket[Any]) -> list[zmq.Frame]:
    """Local. The frames of a message that has arrived."""
    frames = [socket.recv(_NOW, copy=False)]
    while frames[-1].more:
        frames.append(socket.recv(_NOW, copy=False))
    return frames


def hello_message(
    kind: int,
    process: bytes,
    memory: Memory | None = None,
    offered: bytes = b"",
    borrowed: bool = False,
) -> Message:
    """Local. A HELLO, WELCOME or LENT of this process.

    Args:
        kind: Which of them.
        process: Its random name.
        memory: That it lends to the other side.
        offered: Token of the memory that the other side lends.
        borrowed: Whether this process has found that.
    """
    hello = Hello(protocol=PROTOCOL, version=distribution_version(), process=process)
    hello.offered, hello.borrowed = offered, borrowed
    if memory is not None:
        hello.memory.CopyFrom(memory)
    return Message(kind, body=hello.SerializeToString())


def hello_of(message: Message) -> Hello:
    """Local. What a HELLO, WELCOME or LENT says.

    Raises:
        BadFrameError: It cannot be read.
    """
    try:
        return Hello.FromString(message.body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadFrameError(f"the hello cannot be read: {error}") from None


def refused(request: Message) -> Message:
    """Local. The reply to a request of a connection that has not said hello."""
    return failed(request, FailedPreconditionError(_NO_HELLO))


def is_refusal(reply: Message) -> bool:
    """Local. Whether it comes of :func:`refused`."""
    return reply.failure is not None and reply.failure.message == _NO_HELLO


def failed(request: Message, error: OpError) -> Message:
    """Local. The reply to a request that cannot be taken."""
    failure = Failure(code=error.code, message=error.message)
    return Message(REPLY, request.id, request.sender, failure=failure)


def frames_of(message: Message, put: Put | None = None) -> list[bytes | memoryview]:
    """Local. What a message is sent as.

    Args:
        message: The message.
        put: See :data:`Put`; takes large buffers, or leaves them to the frames.
    """
    first, views = pack(message, put)
    pieces = [
        view[start : start + _PIECE_BYTES] for view in views for start in _starts(view.nbytes)
    ]
    return [first, *(piece.data for piece in pieces)]


def array_of(frame: zmq.Frame) -> Array:
    """Local. A received frame as flat uint8, without a copy."""
    return np.frombuffer(frame.buffer, np.uint8) if len(frame) else np.empty(0, np.uint8)


def message_of(frames: Sequence[zmq.Frame], peer: Any, take: Take) -> Message:
    """Local. The message that frames make; large buffers may be cut, or lie elsewhere.

    Args:
        frames: At least one; buffers become views of them.
        peer: Whom they came from.
        take: Gives the buffers that lie in shared memory.

    Raises:
        BadFrameError: They make none.
    """
    message, sizes, place = unpack(frames[0].buffer, peer)
    if place is not None:
        if len(frames) > 1:
            raise BadFrameError("its buffers cannot both follow and lie in shared memory")
        message.buffers = take(place, sizes)
        return message
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
