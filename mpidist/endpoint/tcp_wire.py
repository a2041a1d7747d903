"""What both sides of a tcp connection share: sockets, hellos, and frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq

from mpidist.config import distribution_version
from mpidist.endpoint.frames import BadFrameError
from mpidist.endpoint.message import Array, Message
from mpidist.errors import OpError
from mpidist.proto.mpidist_pb2 import Failure, Header, Hello

# Of the messages and frames; raised by a change that the other side would not understand.
PROTOCOL = 1

# How long a broken connection may take to come back before its other end counts as lost.
GRACE_S = 5.0

_LINGER_MS = 2000
_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000


def new_socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    """Local. A socket that notices a dead network, and drops nothing by itself."""
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = _LINGER_MS
    # What is on its way is bounded by what callers wait for.
    socket.sndhwm = socket.rcvhwm = 0
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _SILENCE_MS
    socket.ipv6 = False
    return socket


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Local. Whether a message can be received without waiting."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def hello_message(kind: Header.Kind, process: bytes) -> Message:
    """Local. A HELLO or WELCOME of this process."""
    hello = Hello(protocol=PROTOCOL, version=distribution_version(), process=process)
    return Message(Header(kind=kind, body=hello.SerializeToString()), (), None)


def failed(request: Header, error: OpError) -> Message:
    """Local. The reply to a request that cannot be taken."""
    failure = Failure(code=error.code, message=error.message)
    header = Header(kind=Header.REPLY, id=request.id, receiver=request.sender, failure=failure)
    return Message(header, (), None)


def array_of(frame: zmq.Frame) -> Array:
    """Local. A received frame as flat uint8, without a copy."""
    return np.frombuffer(frame.buffer, np.uint8) if len(frame) else np.empty(0, np.uint8)


def buffers_of(
    header: Header, inline: list[Array] | None, frames: Sequence[zmq.Frame]
) -> list[Array]:
    """Local. The buffers of a message, which are in its first frame or follow it.

    Raises:
        BadFrameError: They have not the sizes that the header says.
    """
    sizes = [len(frame) for frame in frames]
    if sizes != (list(header.sizes) if inline is None else []):
        raise BadFrameError(f"buffers of {sizes} bytes came in place of {list(header.sizes)}")
    return [array_of(frame) for frame in frames] if inline is None else inline
