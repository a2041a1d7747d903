"""The two sides of tcp: a client's Connection, and a server's Listener with a Session per client.

A client begins with a HELLO, which offers memory to share. Only a server on the same host can open
the memory, and the HELLO_ACK tells whether the server has done so. One half of the memory is the
client's shared buffer, the other half is the server's.

A Connection replaces a socket that has lost its network connection. The first message of the new
socket is a RESUME with the ids of the requests without replies, and the client sends these again.
The server keeps each reply until the client acknowledges it, or sends a RESUME that does not name
the request. So no request is executed twice. The shared memory ends with the socket, because
nothing would release the segments that are lost with the network connection.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import zmq
from google.protobuf.message import DecodeError
from zmq.utils.monitor import recv_monitor_message

from mpidist.arena import Bytes
from mpidist.config import config, distribution_version
from mpidist.errors import DistNetworkError, FailedPreconditionError, UnavailableError
from mpidist.memfd import SharedMemfd, open_memfd
from mpidist.proto.mpidist_pb2 import Failure, Hello, Memory
from mpidist.rpc.codec import BadFrameError, Write, decode, encode, is_inline
from mpidist.rpc.message import (
    ACK,
    CLOSE,
    HELLO,
    HELLO_ACK,
    NOTICE,
    REPLY,
    REQUEST,
    RESUME,
    Message,
)
from mpidist.rpc.shared_buffers import SharedBuffer
from mpidist.rpc.waker import Waker

logger = logging.getLogger(__name__)

# Version of the messages and frames. A change that an older peer would not understand raises it.
PROTOCOL = 6
# A broken connection that does not come back within this time counts as lost.
GRACE_S = 5.0
# Larger buffers are cut: ZeroMQ takes a frame whose transfer exceeds the heartbeat timeout for a
# dead network, and the C library does not keep memory of 32 MiB or more for the next frame.
CHUNK_BYTES = 16 << 20

_SHARED = b"shared"  # body of a HELLO_ACK: the server has opened the memory
_UNKNOWN_SESSION = (
    "the server was started anew, or has given up the connection after a long break; the handlers "
    "of earlier requests may have run or not"
)
_LINGER_MS = 2000
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
# The kernel retries a connection to a silent host less and less often, and would notice late that
# the host is back.
_CONNECT_MS = 1000
_UNBIND_MS = 1000

_CLIENT_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_SERVER_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

# Plain numbers, because combining pyzmq's enumerations takes longer than a call of ZeroMQ.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_SNDMORE = int(zmq.SNDMORE)
_NOBLOCK = int(zmq.NOBLOCK)

# Numbers connections and sockets, so that the sockets of a connection have growing numbers.
_numbers = itertools.count(1)


@dataclass(frozen=True)
class TcpContext:
    """The state that all sockets of a process share.

    Attributes:
        zmq: The ZeroMQ context.
        waker: Wakes threads when a socket becomes readable.
        keys: Public and secret key of all servers that know the secret (CurveZMQ,
            rfc.zeromq.org/spec/26), as Z85 text. The public key never travels. A client without it
            cannot begin a handshake, so knowing the key is knowing the secret. None leaves
            messages in clear.
        process: Random name of the process.
    """

    zmq: zmq.Context[Any]
    waker: Waker
    keys: tuple[bytes, bytes] | None
    process: bytes


class _Socket:
    """A monitored ZeroMQ socket that detects a silent network.

    It has no limit of queued messages, and drops messages for peers that have disconnected. All
    methods are called under the lock of the transport.
    """

    def __init__(self, context: TcpContext, kind: int, events: int) -> None:
        self._waker = context.waker
        self.zmq: zmq.Socket[Any] = context.zmq.socket(kind)
        self.zmq.linger = _LINGER_MS
        self.zmq.sndhwm = self.zmq.rcvhwm = 0  # flow control sets the limit
        self.zmq.heartbeat_ivl = _HEARTBEAT_MS
        self.zmq.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        self.zmq.connect_timeout = _CONNECT_MS
        self.zmq.ipv6 = False
        self._descriptor = int(self.zmq.fileno())
        self._monitor: zmq.Socket[Any] = self.zmq.get_monitor_socket(events)
        self._waker.watch(self._descriptor)

    def has_arrived(self) -> bool:
        """Return True if a message can be received."""
        return _is_readable(self.zmq)

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """Yield the frames of each message that has arrived."""
        while _is_readable(self.zmq):
            frames = [self.zmq.recv(_NOBLOCK, copy=False)]
            while frames[-1].more:
                frames.append(self.zmq.recv(_NOBLOCK, copy=False))
            yield frames

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send frames as one message. Large frames are not copied."""
        last = len(frames) - 1
        with suppress(zmq.Again):  # the connection was refused
            for number, frame in enumerate(frames):
                flags = _NOBLOCK if number == last else _NOBLOCK | _SNDMORE
                self.zmq.send(frame, flags, copy=False)
        # ZeroMQ's descriptor is edge-triggered, and sending consumes the edge. So wake the leader
        # if a message has arrived.
        if self._waker.waiting and self.has_arrived():
            self._waker.wake()

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield the kind and the value of each new event of the monitor."""
        while _is_readable(self._monitor):
            event = recv_monitor_message(self._monitor)
            yield event["event"], event["value"]

    def unbind(self) -> None:
        """Free the port, and wait until ZeroMQ's I/O thread has closed it."""
        self.zmq.unbind(cast("bytes", self.zmq.getsockopt(zmq.LAST_ENDPOINT)))
        while self._monitor.poll(_UNBIND_MS):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_CLOSED:
                break

    def close(self, linger: int | None = None) -> None:
        """Close the socket once everything has been sent, or ``linger`` milliseconds are over."""
        self._waker.ignore(self._descriptor)
        self.zmq.disable_monitor()
        self._monitor.close(0)
        self.zmq.close(linger)


class _Side:
    """One side of a connection: turns messages into frames, and frames into messages."""

    _write: Write | None = None  # to the own shared buffer
    _other: SharedBuffer | None = None  # of the other side

    def share(self, memory: Bytes | None, *, is_client: bool = False) -> None:
        """Send large buffers through the own half of a memory; None shares none."""
        self._write = self._other = None
        if memory is not None:
            middle = memory.nbytes // 2
            halves = SharedBuffer(memory[:middle]), SharedBuffer(memory[middle:])
            own, self._other = halves if is_client else reversed(halves)
            self._write = own.write

    def encode(self, message: Message) -> list[bytes | memoryview]:
        """Return the frames of a message. Large buffers are written to shared memory, or cut."""
        first, buffers = encode(message, self._write)
        frames: list[bytes | memoryview] = [first]
        for buffer in buffers:
            frames += [buffer[one : one + CHUNK_BYTES].data for one in _chunk_starts(buffer.nbytes)]
        return frames

    def decode(self, frames: Sequence[zmq.Frame]) -> Message:
        """Return the message that frames make. Its buffers are views, unless they were cut.

        Raises:
            BadFrameError: The bytes are not a message.
        """
        message, sizes, location = decode(frames[0].buffer, self)
        if location is not None:
            if len(frames) > 1 or self._other is None:
                raise BadFrameError("its buffers cannot be in shared memory")
            message.buffers = self._other.read(location, sizes)
            return message
        lengths = [len(frame) for frame in frames[1:]]
        # The sums are compared first, because absurd sizes would make an endless list.
        if sum(lengths) != sum(sizes) or lengths != [
            min(size - start, CHUNK_BYTES) for size in sizes for start in _chunk_starts(size)
        ]:
            raise BadFrameError(f"buffers of {lengths} bytes came in place of {list(sizes)}")
        if sizes:
            arrays = iter([np.frombuffer(frame.buffer, np.uint8) for frame in frames[1:]])
            chunks = [[next(arrays) for _ in _chunk_starts(size)] for size in sizes]
            message.buffers = [one[0] if len(one) == 1 else np.concatenate(one) for one in chunks]
        return message


class Connection(_Side):
    """The client side: a connection that resumes by itself, for all endpoints of the process.

    Args:
        context: State of the process.
        host: Host of the server.
        port: Port of the server.

    Attributes:
        loss: Why no reply can arrive any more; None as long as one can.
    """

    def __init__(self, context: TcpContext, host: str, port: int) -> None:
        self._context = context
        self._url = f"tcp://{host}:{port}"
        self._number = next(_numbers)
        self._unanswered: dict[int, Message] = {}
        self._acks: list[int] = []
        self._offered: SharedMemfd | None = None
        self._has_session = self._has_connected = self._is_retrying = False
        self._broken_at: float | None = None
        self.loss: str | None = None
        self._socket = self._connect()

    @property
    def is_open(self) -> bool:
        """True while the network connection is open."""
        return self._has_connected and self._broken_at is None

    def send(self, message: Message) -> None:
        """Send a request or a notice. If the connection is lost or closed, a notice is dropped.

        Raises:
            UnavailableError: A request cannot be sent, because the connection is lost or closed.
        """
        if self.loss is not None:
            if message.kind == REQUEST:
                raise UnavailableError(f"{message.method} is not sent to {self._url}: {self.loss}")
            return
        message.own_buffers()  # a request may be resent after a reconnect
        if message.kind == REQUEST:
            self._unanswered[message.id] = message
        message.acks, self._acks = self._acks, []
        self._socket.send(self.encode(message))

    def forget(self, request_id: int) -> None:
        """Stop waiting for the reply to a request."""
        if self._unanswered.pop(request_id, None) is not None:
            self._acks.append(request_id)

    def receive(self) -> list[Message]:
        """Return the replies that have arrived."""
        replies: list[Message] = []
        for frames in self._socket.receive():
            try:
                message = self.decode(frames)
            except BadFrameError as error:
                text = "dropped corrupt bytes from the server at %s: %s"
                logger.error(text, self._url, error)  # noqa: TRY400
                continue
            if message.kind == HELLO_ACK:
                self._handle_ack(message)
            elif message.kind == CLOSE:
                self.loss = "the server's endpoint was closed"
            elif message.kind == REPLY and self._unanswered.pop(message.id, None) is not None:
                replies.append(message)
                self._acks.append(message.id)
                # The server keeps a large reply until it is acknowledged, so do that at once.
                if not is_inline(message.buffers, len(message.body)):
                    self.send(Message(ACK))
            if self.loss is not None:
                break
        return replies

    def check(self) -> None:
        """Read the socket's events. Replace a broken socket, and set ``loss`` after GRACE_S."""
        if self.loss is not None:
            return
        is_broken = False
        for event, _ in self._socket.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._set_open()
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._is_retrying = True
            else:
                is_broken = is_broken or self.is_open
                self._broken_at = self._broken_at or time.monotonic()
        if is_broken:  # ZeroMQ itself connects again, but without a RESUME
            broken = self._socket
            try:
                self._socket = self._connect()
            except zmq.ZMQError as error:  # mostly because too many files are open
                self.loss = f"the connection was broken, and cannot be opened again: {error}"
                return
            broken.close(0)
        if self._broken_at is not None and time.monotonic() - self._broken_at > GRACE_S:
            self.loss = (
                f"the connection has been broken for {GRACE_S:g} s"
                if self._has_connected
                else f"the server has refused every connection for {GRACE_S:g} s: the secrets "
                "(MPIDIST_SECRET) differ, or another program listens at the port"
            )

    def close(self) -> None:
        """Say that the connection ends, and close the socket once everything has been sent."""
        self.receive()  # if the server has closed the connection, too, nothing needs to be sent
        self.check()
        if self.loss is None:
            self._socket.send(self.encode(Message(CLOSE)))
        # Where no process listens, lingering would only delay the end of this process.
        gone = self.loss is not None or self._broken_at is not None or self._is_retrying
        self._socket.close(0 if gone else None)
        self.share(None)
        self.loss = self.loss or "this process has closed the connection"

    def _connect(self) -> _Socket:
        """Return a new socket. The requests without replies go behind its HELLO or RESUME."""
        socket = _Socket(self._context, zmq.DEALER, _CLIENT_EVENTS)
        try:
            if self._context.keys is not None:
                socket.zmq.curve_serverkey = self._context.keys[0]
                socket.zmq.curve_publickey, socket.zmq.curve_secretkey = zmq.curve_keypair()
            socket.zmq.connect(self._url)
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._is_retrying = False
        self._broken_at = time.monotonic() if self._has_connected else None
        self._acks = []
        self._offered = None
        self.share(None)
        with suppress(OSError):  # no memory can be shared
            self._offered = SharedMemfd(2 * config.shared_buffer_bytes)
        reference = None if self._offered is None else self._offered.reference
        hello = hello_message(self._context.process, reference)
        hello.kind = RESUME if self._has_session else HELLO
        hello.id, hello.sender, hello.acks = next(_numbers), self._number, list(self._unanswered)
        for message in (hello, *self._unanswered.values()):
            socket.send(self.encode(message))
        return socket

    def _set_open(self) -> None:
        self._has_connected = True
        self._broken_at = None

    def _handle_ack(self, message: Message) -> None:
        if message.failure is not None:
            self.loss = message.failure.message
            return
        self._has_session = True
        self._set_open()
        offered, self._offered = self._offered, None
        if offered is not None and message.body == _SHARED:
            offered.close()
            self.share(offered.memory, is_client=True)


@dataclass(eq=False)
class Session(_Side):
    """A client's connection, as the server knows it. It outlives the sockets of the connection.

    Attributes:
        listener: The listening socket of the server.
        client: Random name of the client's process, and the number of the connection there.
        routing_id: Routing id of the client's newest socket (zmq_socket(3), ROUTER).
        number: Number of that socket.
        accepted: Number of its network connection; None if that had ended before the HELLO came.
        lost_at: Time at which the network connection was found broken; None while it is open.
        replies: The reply cache: by id, the replies to requests that the client can repeat. None
            stands for a request that has no reply yet.
    """

    listener: Listener
    client: tuple[bytes, int]
    routing_id: bytes = b""
    number: int = 0
    accepted: int | None = None
    lost_at: float | None = None
    replies: dict[int, Message | None] = field(default_factory=dict)

    @property
    def process(self) -> str:
        """Name of the client's process."""
        return self.client[0].hex()

    def send(self, message: Message) -> None:
        """Send a reply, and keep it in case the client repeats the request."""
        if message.id in self.replies:
            self.replies[message.id] = message
        self.listener.send(self.routing_id, self.encode(message))


class Listener:
    """The server side: the listening socket of an endpoint, and the sessions of its clients.

    Args:
        context: State of the process. With keys other hosts are admitted.
        port: Port to listen at; None takes a free one.

    Attributes:
        port: The port.

    Raises:
        DistNetworkError: The port is in use, or must not be used.
    """

    def __init__(self, context: TcpContext, port: int | None) -> None:
        self._sessions: dict[bytes, Session] = {}  # by routing id
        self._ended: set[str] = set()  # processes that have closed a connection
        # Numbers of the open network connections, by descriptor. The system uses descriptors again.
        self._accepted: dict[int, int] = {}
        self._reported = False
        self._closed = False
        self._socket = _Socket(context, zmq.ROUTER, _SERVER_EVENTS)
        if context.keys is not None:
            self._socket.zmq.curve_server = True
            self._socket.zmq.curve_publickey, self._socket.zmq.curve_secretkey = context.keys
        address = f"tcp://{'*' if context.keys is not None else '127.0.0.1'}"
        try:
            if port is None:
                self.port = self._socket.zmq.bind_to_random_port(address)
            else:
                self._socket.zmq.bind(f"{address}:{port}")
                self.port = port
        except zmq.ZMQError as error:
            self._socket.close()
            raise DistNetworkError(
                f"cannot listen at {address}{'' if port is None else f':{port}'}: "
                f"{error.strerror}; choose another port (number=None takes a free one)"
            ) from None

    def receive(self) -> list[Message]:
        """Return the requests and notices that have arrived; handle all other messages."""
        messages = []
        for frames in self._socket.receive():
            try:
                message = self._handle(frames)
            except (BadFrameError, DecodeError, UnicodeDecodeError) as error:
                self._report(frames, error)
                continue
            if message is not None:
                messages.append(message)
        return messages

    def send(self, routing_id: bytes, frames: Sequence[bytes | memoryview]) -> None:
        """Send frames to a client, unless the listener is closed."""
        if not self._closed:
            self._socket.send([routing_id, *frames])

    def check(self) -> set[str]:
        """Return the processes that have closed their connection, or stayed away for too long.

        A process that has another connection is not lost.
        """
        self._read_events()
        now = time.monotonic()
        in_order = set(self._accepted.values())
        for session in list(self._sessions.values()):
            if session.accepted in in_order:
                session.lost_at = None
            elif session.lost_at is None:
                session.lost_at = now
            elif now - session.lost_at > GRACE_S:
                self._end(session)
        ended, self._ended = self._ended, set()
        return ended and ended - {session.process for session in self._sessions.values()}

    def close(self) -> None:
        """Tell the clients, and close the socket once everything has been sent."""
        for session in list(self._sessions.values()):
            session.send(Message(CLOSE))
            self._end(session)
        self._closed = True
        self._socket.unbind()
        self._socket.close()

    def _handle(self, frames: list[zmq.Frame]) -> Message | None:
        """Return a new request or notice."""
        routing_id = frames[0].bytes
        if len(frames) < 2:
            raise BadFrameError("no frame came with the routing id")
        session = self._sessions.get(routing_id)
        if session is None:
            self._handle_hello(routing_id, frames[1:])
            return None
        message = session.decode(frames[1:])
        replies = session.replies
        for request_id in message.acks:
            replies.pop(request_id, None)
        if message.kind == NOTICE:
            return message
        if message.kind == CLOSE:
            self._end(session)
        elif message.kind == REQUEST:
            if message.id not in replies:
                replies[message.id] = None
                return message
            reply = replies[message.id]  # the client repeats the request
            if reply is not None:
                session.send(reply)
        return None

    def _handle_hello(self, routing_id: bytes, frames: list[zmq.Frame]) -> None:
        """Begin or resume a session."""
        message, _, _ = decode(frames[0].buffer, None)
        if message.kind not in (HELLO, RESUME):
            return  # it was sent before the client noticed that its connection was broken
        hello = Hello.FromString(message.body)
        client = hello.process, message.sender
        session = next((one for one in self._sessions.values() if one.client == client), None)
        if hello.protocol != PROTOCOL:
            self._refuse(
                routing_id,
                f"the server speaks protocol {PROTOCOL} and the client {hello.protocol} (mpidist "
                f"{hello.version}): install the same version of mpidist on both sides",
            )
            return
        if session is None:
            if message.kind == RESUME:
                self._refuse(routing_id, _UNKNOWN_SESSION)
                return
            session = Session(self, client)
        elif session.number > message.id:
            return  # it comes late, from a socket that the client has replaced
        else:
            del self._sessions[session.routing_id]
        self._sessions[routing_id] = session
        session.routing_id, session.number = routing_id, message.id
        session.replies = {
            request_id: session.replies[request_id]
            for request_id in message.acks
            if request_id in session.replies
        }
        # The previous connection with this descriptor may have ended just now.
        self._read_events()
        session.accepted = self._accepted.get(frames[0].get(zmq.SRCFD))
        memory = _open_offered(hello.memory)
        ack = Message(HELLO_ACK, body=b"" if memory is None else _SHARED)
        session.share(None)
        session.send(ack)
        session.share(memory)

    def _refuse(self, routing_id: bytes, text: str) -> None:
        failure = Failure(code=FailedPreconditionError.code, message=text)
        self.send(routing_id, _Side().encode(Message(HELLO_ACK, failure=failure)))

    def _end(self, session: Session) -> None:
        del self._sessions[session.routing_id]
        session.replies.clear()  # they refer to the session
        self._ended.add(session.process)

    def _read_events(self) -> None:
        """Record the network connections that have begun or ended."""
        for event, handle in self._socket.events():
            if event == zmq.EVENT_ACCEPTED:
                self._accepted[handle] = next(_numbers)
            else:
                self._accepted.pop(handle, None)

    def _report(self, frames: list[zmq.Frame], error: Exception) -> None:
        # A client that sends corrupt bytes mostly sends many.
        level = logging.DEBUG if self._reported else logging.ERROR
        self._reported = True
        origin = frames[0].bytes.hex()
        text = "tcp port %d dropped corrupt bytes from client %s: %s"
        logger.log(level, text, self.port, origin, error)


def hello_message(process: bytes, memory: Memory | None = None) -> Message:
    """Return the HELLO of a process that offers to share a memory."""
    hello = Hello(protocol=PROTOCOL, version=distribution_version(), process=process, memory=memory)
    return Message(HELLO, body=hello.SerializeToString())


def _chunk_starts(nbytes: int) -> range:
    return range(0, max(nbytes, 1), CHUNK_BYTES)


def _is_readable(socket: zmq.Socket[Any]) -> bool:
    return cast("int", socket.getsockopt(_EVENTS)) & _POLLIN != 0


def _open_offered(reference: Memory) -> Bytes | None:
    """Return the memory that a client offers; None if this process cannot open it."""
    if not reference.pid:
        return None
    try:
        return open_memfd(reference)
    except OSError as error:  # mostly because the client is on another host
        logger.debug("no memory is shared with process %d: %s", reference.pid, error)
        return None
