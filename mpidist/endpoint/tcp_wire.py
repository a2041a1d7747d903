"""What both sides of a tcp connection share: sockets, hellos, and frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq

from mpidist.config import distribution_version
from mpidist.endpoint.frames import BadFrameError, unpack
from mpidist.endpoint.message import REPLY, Array, Message
from mpidist.errors import OpError
from mpidist.proto.mpidist_pb2 import Failure, Hello

# Of the messages and frames; raised by a change that the other side would not understand.
PROTOCOL = 1

# How long a broken connection may take to come back before its other end counts as lost.
GRACE_S = 5.0

_LINGER_MS = 2000
_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000
# The kernel asks a host that does not answer less and less often; we must hear of its return soon.
_CONNECT_MS = 1000


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


def failed(request: Message, error: OpError) -> Message:
    """Local. The reply to a request that cannot be taken."""
    failure = Failure(code=error.code, message=error.message)
    return Message(REPLY, request.id, request.sender, failure=failure)


def array_of(frame: zmq.Frame) -> Array:
    """Local. A received frame as flat uint8, without a copy."""
    return np.frombuffer(frame.buffer, np.uint8) if len(frame) else np.empty(0, np.uint8)


def message_of(frames: Sequence[zmq.Frame], peer: Any) -> Message:
    """Local. The message that frames make.

    Args:
        frames: At least one; buffers become views of them.
        peer: Whom they came from.

    Raises:
        BadFrameError: They make none.
    """
    message, sizes, follow = unpack(frames[0].buffer, peer)
    here = [len(frame) for frame in frames[1:]]
    if here != (list(sizes) if follow else []):
        raise BadFrameError(f"buffers of {here} bytes came in place of {list(sizes)}")
    if follow:
        message.buffers = [array_of(frame) for frame in frames[1:]]
    return message
