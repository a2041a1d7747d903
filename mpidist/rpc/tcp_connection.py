"""The two sides of tcp: a connection to a server, and the listening socket of an endpoint.

A client begins a connection with a HELLO, and repeats it after a reconnection. The hello offers
memory to share, which only a server on the same host can open; the HELLO_ACK says if it has. One
half of the memory is the client's shared buffer, the other half is the server's. The memory ends
with the connection, because nothing would release the segments that are lost with it.

After a reconnection the client also repeats the requests without replies. The server recognises
repeated requests by their ids, and keeps each reply until it is acknowledged.
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
from mpidist.errors import DistNetworkError, FailedPreconditionError, OpError
from mpidist.memfd import SharedMemfd, open_memfd
from mpidist.proto.mpidist_pb2 import Failure, Hello, Memory
from mpidist.rpc.codec import BadFrameError, decode, encode, is_inline
from mpidist.rpc.message import (
    ACK,
    CLOSE,
    HELLO,
    HELLO_ACK,
    NOTICE,
    REPLY,
    REQUEST,
    Array,
    Message,
)
from mpidist.rpc.reply_cache import ReplyCache
from mpidist.rpc.shared_buffers import SharedBuffer

logger = logging.getLogger(__name__)

# Version of the messages and frames. A change that an older peer would not understand raises it.
PROTOCOL = 4
# A broken connection that does not come back within this time counts as lost.
GRACE_S = 5.0
# Larger buffers are cut: ZeroMQ takes a frame whose transfer exceeds the heartbeat timeout for a
# dead network.
CHUNK_BYTES = 16 << 20

_LINGER_MS = 2000
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
# The kernel retries a connection to a silent host less and less often, and would notice late that
# the host is back.
_CONNECT_MS = 1000
_UNBIND_MS = 1000
_CLOSED = float("-inf")  # time of loss of a client that has closed its connection

_NO_HELLO = "this connection has not said hello"
_RESTARTED = "the server was started anew; what it was asked may or may not be done"
_CLIENT_NUMBERS = itertools.count()

_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_CLIENT_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | _HANDSHAKE_FAILED
)
_SERVER_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

# Plain numbers, because combining pyzmq's enumerations takes longer than a call of ZeroMQ.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_SNDMORE = int(zmq.SNDMORE)
_NOBLOCK = int(zmq.NOBLOCK)


@dataclass(frozen=True)
class Keys:
    """The key pairs that follow from a shared secret (CurveZMQ, rfc.zeromq.org/spec/26).

    The server's public key never travels. A client without it cannot begin a handshake, so knowing
    the key is knowing the secret.

    Attributes:
        server: Public and secret key of listening sockets, as Z85 text.
        client: Public and secret key of connecting sockets.
    """

    server: tuple[bytes, bytes]
    client: tuple[bytes, bytes]


class _Socket:
    """A monitored ZeroMQ socket that detects a dead network, and drops no messages by itself.

    Its owner holds a lock.
    """

    def __init__(self, context: zmq.Context[Any], kind: int, events: int) -> None:
        self._socket: zmq.Socket[Any] = context.socket(kind)
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = 0  # flow control sets the limit
        self._socket.heartbeat_ivl = _HEARTBEAT_MS
        self._socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        self._socket.connect_timeout = _CONNECT_MS
        self._socket.ipv6 = False
        self._monitor: zmq.Socket[Any] = self._socket.get_monitor_socket(events)

    @property
    def descriptor(self) -> int:
        """The file descriptor that becomes readable when a message arrives."""
        return int(self._socket.fileno())

    def has_arrived(self) -> bool:
        """Return True if a message can be received."""
        return _is_readable(self._socket)

    def _receive_frames(self) -> Iterator[list[zmq.Frame]]:
        """Yield the frames of each message that has arrived."""
        while _is_readable(self._socket):
            frames = [self._socket.recv(_NOBLOCK, copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(_NOBLOCK, copy=False))
            yield frames

    def _send_frames(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send frames as one message. Large frames are not copied."""
        last = len(frames) - 1
        with suppress(zmq.Again):  # the connection was refused, and there is none to send over
            for number, frame in enumerate(frames):
                flags = _NOBLOCK if number == last else _NOBLOCK | _SNDMORE
                self._socket.send(frame, flags, copy=False)

    def _new_events(self) -> Iterator[tuple[int, int]]:
        """Yield the kind and the value of each new event."""
        while _is_readable(self._monitor):
            event = recv_monitor_message(self._monitor)
            yield event["event"], event["value"]

    def _close_socket(self, linger: int | None = None) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger)


class _SharedMemory:
    """The memory that the two sides of a connection share.

    Args:
        memory: The memory, or None if nothing is shared.
        is_client: Which side this is.

    Attributes:
        write: Writes to the own half; see :data:`Write`. None if nothing is shared.
    """

    def __init__(self, memory: Bytes | None = None, *, is_client: bool = False) -> None:
        self.write = self._other = None
        if memory is not None:
            middle = memory.nbytes // 2
            halves = SharedBuffer(memory[:middle]), SharedBuffer(memory[middle:])
            own, self._other = halves if is_client else reversed(halves)
            self.write = own.write

    def read(self, location: int, sizes: Sequence[int]) -> list[Array]:
        """Return buffers in the other half; see :meth:`SharedBuffer.read`."""
        if self._other is None:
            raise BadFrameError("its buffers are said to be in shared memory, and there is none")
        return self._other.read(location, sizes)


_NOT_SHARED = _SharedMemory()


class Connection(_Socket):
    """The client side: a connection that reconnects by itself, for all endpoints of the process.

    Args:
        context: ZeroMQ context of the process.
        keys: Keys that encrypt the connection; None leaves it in clear.
        host: Host of the server.
        port: Port of the server.
        process: Random name of this process.

    Attributes:
        loss: Why no reply can arrive any more; None as long as one can.
    """

    def __init__(
        self, context: zmq.Context[Any], keys: Keys | None, host: str, port: int, process: bytes
    ) -> None:
        super().__init__(context, zmq.DEALER, _CLIENT_EVENTS)
        self._process = process
        self._server: bytes | None = None
        self._offered: SharedMemfd | None = None
        self._shared = _NOT_SHARED
        self._unanswered: dict[int, Message] = {}
        self._acks: list[int] = []
        self._connections = 0
        self._broken_at: float | None = None
        self._is_retrying = False
        self.loss: str | None = None
        self._socket.routing_id = process + next(_CLIENT_NUMBERS).to_bytes(4)
        if keys is not None:
            self._socket.curve_serverkey = keys.server[0]
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.client
        self._socket.connect(f"tcp://{host}:{port}")
        self._say_hello()

    @property
    def is_open(self) -> bool:
        """True if the connection has been made and is not broken."""
        # HELLO_ACK may arrive up to 20 ms before the event of the handshake is read.
        was_made = self._connections > 0 or self._server is not None
        return was_made and self.loss is None and self._broken_at is None

    def send(self, message: Message) -> None:
        """Send a request or a notice."""
        if message.kind == REQUEST:
            self._unanswered[message.id] = message
        message.acks, self._acks = self._acks, []
        self._transmit(message)

    def forget(self, request_id: int) -> None:
        """Stop waiting for the reply to a request."""
        if self._unanswered.pop(request_id, None) is not None:
            self._acks.append(request_id)

    def receive(self) -> list[Message]:
        """Return the replies that have arrived."""
        replies: list[Message] = []
        for frames in self._receive_frames():
            try:
                self._handle(_decode(frames, self, self._shared), replies)
            except BadFrameError as error:
                logger.error("a server sent no message: %s", error)  # noqa: TRY400
            if self.loss is not None:
                break
        return replies

    def check(self) -> None:
        """Notice a broken connection, its return, and its final loss."""
        now = time.monotonic()
        for event, _ in self._new_events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._broken_at = None
                self._is_retrying = False
                self._connections += 1
                if self._connections > 1:
                    self._say_hello()
                    for message in self._unanswered.values():
                        self._transmit(message)
            elif event == zmq.EVENT_DISCONNECTED:
                self._broken_at = self._broken_at or now
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._is_retrying = True
            else:
                self.loss = "it was refused there: the secrets (MPIDIST_SECRET) differ"
        if self._broken_at is not None and now - self._broken_at > GRACE_S:
            self.loss = (
                f"the connection has been broken for {GRACE_S:g} s"
                if self._connections
                else f"every connection was closed there for {GRACE_S:g} s: the secrets "
                "(MPIDIST_SECRET) differ, or it is no endpoint of mpidist"
            )

    def close(self) -> None:
        """Say that the connection ends, and close the socket once everything has been sent."""
        self.receive()  # if the server has closed the connection, too, nothing needs to be sent
        self.check()
        if self.loss is None:
            self._transmit(Message(CLOSE))
        # Where no process listens, lingering would only delay the end of this process.
        gone = self.loss is not None or self._broken_at is not None or self._is_retrying
        self._close_socket(0 if gone else None)
        self._offered, self._shared = None, _NOT_SHARED

    def _say_hello(self) -> None:
        self._shared, self._offered = _NOT_SHARED, None
        try:
            self._offered = SharedMemfd(2 * config.shared_buffer_bytes)
        except OSError as error:
            logger.info("no memory can be shared over tcp: %s", error)
        reference = None if self._offered is None else self._offered.reference
        self._transmit(hello_message(HELLO, self._process, reference))

    def _handle(self, message: Message, replies: list[Message]) -> None:
        if message.kind == HELLO_ACK:
            self._handle_ack(message)
        elif message.kind == CLOSE:
            self.loss = "its endpoint was closed"
        elif message.kind == REPLY and is_refusal(message):
            # A request overtook the hello: messages sent while the connection was broken go first.
            # A server that has not acknowledged a hello yet gets the request again, behind the
            # hello of the new connection. A server that has acknowledged one has lost its state.
            if self._server is not None:
                self.loss = _RESTARTED
        elif message.kind == REPLY and self._unanswered.pop(message.id, None) is not None:
            replies.append(message)
            self._acks.append(message.id)
            if not is_inline(message.buffers):  # the server keeps these large buffers until then
                self.send(Message(ACK))

    def _handle_ack(self, message: Message) -> None:
        if message.failure is not None:
            self.loss = message.failure.message
            return
        hello = hello_of(message)
        if self._server not in (None, hello.process):
            self.loss = _RESTARTED
        self._server = hello.process
        offered = self._offered
        if offered is None or offered.reference.token != hello.memory.token:
            return  # it is not shared, or this acknowledges an earlier hello
        offered.close()
        self._offered, self._shared = None, _SharedMemory(offered.memory, is_client=True)

    def _transmit(self, message: Message) -> None:
        self._send_frames(frames_of(message, self._shared))


@dataclass
class _Client:
    """The server's state of a client that has said hello.

    Attributes:
        process: Random name of the client's process.
        handle: Descriptor of its connection, as in events of the socket's monitor.
        shared: The memory that the connection shares.
        replies: Replies to its requests.
        lost_at: Time at which its connection broke; None while it is connected.
    """

    process: bytes
    handle: int = -1
    shared: _SharedMemory = _NOT_SHARED
    replies: ReplyCache = field(default_factory=ReplyCache)
    lost_at: float | None = None


class Listener(_Socket):
    """The server side: the listening socket of an endpoint, and the state of its clients.

    Args:
        context: ZeroMQ context of the process.
        keys: Keys that encrypt the connections and admit other hosts. None admits this host only.
        port: Port to listen at; None takes a free one.
        process: Random name of this process.

    Attributes:
        port: The port.
        closed: True once nothing can be sent any more.

    Raises:
        DistNetworkError: The port is in use, or must not be used.
    """

    def __init__(
        self, context: zmq.Context[Any], keys: Keys | None, port: int | None, process: bytes
    ) -> None:
        super().__init__(context, zmq.ROUTER, _SERVER_EVENTS)
        self.closed = False
        self._process = process
        self._clients: dict[bytes, _Client] = {}
        self._open: set[int] = set()  # handles of connections
        self._reported = False
        self._socket.router_handover = True  # a client that reconnects keeps its routing id
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.server
        address = f"tcp://{'*' if keys is not None else '127.0.0.1'}"
        try:
            if port is None:
                self.port = self._socket.bind_to_random_port(address)
            else:
                self._socket.bind(f"{address}:{port}")
                self.port = port
        except zmq.ZMQError as error:
            self.close()
            raise DistNetworkError(
                f"cannot listen at {address}:{port}: {error.strerror}; choose another port, or 0 "
                "for any that is free"
            ) from None

    def receive(self) -> list[Message]:
        """Return the requests and notices that have arrived; handle all other messages."""
        messages = []
        for frames in self._receive_frames():
            try:
                message = self._handle(frames)
            except BadFrameError as error:
                self._report(frames, error)
                continue
            if message is not None:
                messages.append(message)
        return messages

    def send(self, name: bytes, message: Message) -> None:
        """Send a reply to a client, and keep it in case the client repeats the request."""
        client = self._clients.get(name)
        if client is not None and message.kind == REPLY:
            client.replies.store(message.id, message)
        shared = _NOT_SHARED if client is None else client.shared
        self._send_frames([name, *frames_of(message, shared)])

    def process_of(self, name: bytes) -> str:
        """Return the name of a client's process."""
        client = self._clients.get(name)
        return (name if client is None else client.process).hex()

    def check(self) -> list[str]:
        """Return the processes that have closed their connection, or stayed away for too long.

        A process that has connected again meanwhile, under another routing id, is not lost.
        """
        self._handle_events()
        now = time.monotonic()
        lost = [
            name
            for name, client in self._clients.items()
            if client.lost_at is not None and now - client.lost_at > GRACE_S
        ]
        processes = {self._clients.pop(name).process for name in lost}
        processes -= {client.process for client in self._clients.values()}
        return [process.hex() for process in processes]

    def close(self) -> None:
        """Tell the clients, and close the socket once everything has been sent."""
        self.closed = True
        for name in self._clients:
            self._send_frames([name, *frames_of(Message(CLOSE), _NOT_SHARED)])
        # Another thread unbinds the port. Wait, so that the next endpoint can bind it.
        with suppress(zmq.ZMQError):  # the port was never bound
            self._socket.unbind(bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)))
            while self._monitor.poll(_UNBIND_MS):
                if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_CLOSED:
                    break
        self._close_socket()
        self._clients.clear()

    def _handle(self, frames: list[zmq.Frame]) -> Message | None:
        """Return a new request or notice."""
        name = frames[0].bytes
        if len(frames) < 2:
            raise BadFrameError("no frame came with the name")
        client = self._clients.get(name)
        message = _decode(
            frames[1:], (self, name), _NOT_SHARED if client is None else client.shared
        )
        if message.kind == HELLO:
            self._handle_hello(name, message, frames[1].get(zmq.SRCFD))
            return None
        if client is None:
            if message.kind == REQUEST:
                self.send(name, failed(message, FailedPreconditionError(_NO_HELLO)))
            return None
        if client.lost_at == _CLOSED:
            return None
        client.lost_at = _CLOSED if message.kind == CLOSE else None
        client.replies.ack(message.acks)
        if message.kind == NOTICE or (message.kind == REQUEST and client.replies.admit(message.id)):
            return message
        repeated = client.replies.get(message.id) if message.kind == REQUEST else None
        if repeated is not None:
            self.send(name, repeated)
        return None

    def _handle_hello(self, name: bytes, message: Message, handle: int) -> None:
        hello = hello_of(message)
        if hello.protocol != PROTOCOL:
            error = FailedPreconditionError(
                f"the server speaks protocol {PROTOCOL} and the client {hello.protocol} (mpidist "
                f"{hello.version}): install the same version of mpidist on both sides"
            )
            ack = hello_message(HELLO_ACK, self._process)
            ack.failure = failed(message, error).failure
            self.send(name, ack)
            return
        # Old events first: the previous connection with this handle may have ended just now.
        self._handle_events()
        client = self._clients.setdefault(name, _Client(hello.process))
        client.handle = handle
        client.lost_at = None if handle in self._open else time.monotonic()
        client.shared = _NOT_SHARED
        shared = _open_offered(hello.memory)
        opened = None if shared is None else hello.memory
        self.send(name, hello_message(HELLO_ACK, self._process, opened))
        client.shared = shared or _NOT_SHARED

    def _handle_events(self) -> None:
        """Record the connections that have begun or ended."""
        now = time.monotonic()
        for event, handle in self._new_events():
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(handle)
                continue
            self._open.discard(handle)
            for client in self._clients.values():
                if client.handle == handle and client.lost_at is None:
                    client.lost_at = now

    def _report(self, frames: list[zmq.Frame], error: BadFrameError) -> None:
        # A client that sends corrupt bytes mostly sends many.
        level = logging.DEBUG if self._reported else logging.ERROR
        self._reported = True
        origin = frames[0].bytes.hex()
        logger.log(level, "tcp port %d: client %s sent no message: %s", self.port, origin, error)


def hello_message(kind: int, process: bytes, memory: Memory | None = None) -> Message:
    """Return a HELLO or HELLO_ACK.

    Args:
        kind: Its kind.
        process: Random name of this process.
        memory: Memory that the client offers, or that the server has opened.
    """
    hello = Hello(protocol=PROTOCOL, version=distribution_version(), process=process, memory=memory)
    return Message(kind, body=hello.SerializeToString())


def hello_of(message: Message) -> Hello:
    """Return the body of a HELLO or HELLO_ACK.

    Raises:
        BadFrameError: It cannot be read.
    """
    try:
        return Hello.FromString(message.body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadFrameError(f"the hello cannot be read: {error}") from None


def failed(request: Message, error: OpError) -> Message:
    """Return the reply to a request that cannot be accepted."""
    failure = Failure(code=error.code, message=error.message)
    return Message(REPLY, request.id, request.sender, failure=failure)


def is_refusal(reply: Message) -> bool:
    """Return True if a reply refuses a request because no hello came before it."""
    return reply.failure is not None and reply.failure.message == _NO_HELLO


def frames_of(message: Message, shared: _SharedMemory) -> list[bytes | memoryview]:
    """Return the frames of a message. Large buffers go to shared memory, or are cut."""
    first, buffers = encode(message, shared.write)
    chunks = [
        buffer[start : start + CHUNK_BYTES].data
        for buffer in buffers
        for start in _chunk_starts(buffer.nbytes)
    ]
    return [first, *chunks]


def _decode(frames: Sequence[zmq.Frame], peer: Any, shared: _SharedMemory) -> Message:
    """Return the message that frames make; its buffers are views of them, if they are not cut."""
    message, sizes, location = decode(frames[0].buffer, peer)
    if location is not None:
        if len(frames) > 1:
            raise BadFrameError("its buffers cannot both follow and be in shared memory")
        message.buffers = shared.read(location, sizes)
        return message
    lengths = [len(frame) for frame in frames[1:]]
    # The sums are compared first, because absurd sizes would make an endless list.
    if sum(lengths) != sum(sizes) or lengths != [
        min(size - start, CHUNK_BYTES) for size in sizes for start in _chunk_starts(size)
    ]:
        raise BadFrameError(f"buffers of {lengths} bytes came in place of {list(sizes)}")
    if sizes:
        arrays = iter(
            [np.frombuffer(frame.buffer if len(frame) else b"", np.uint8) for frame in frames[1:]]
        )
        chunks = [[next(arrays) for _ in _chunk_starts(size)] for size in sizes]
        message.buffers = [one[0] if len(one) == 1 else np.concatenate(one) for one in chunks]
    return message


def _chunk_starts(nbytes: int) -> range:
    """Return where the chunks of a buffer begin; an empty buffer is one chunk."""
    return range(0, max(nbytes, 1), CHUNK_BYTES)


def _is_readable(socket: zmq.Socket[Any]) -> bool:
    return cast("int", socket.getsockopt(_EVENTS)) & _POLLIN != 0


def _open_offered(reference: Memory) -> _SharedMemory | None:
    """Return the memory that a client offers; None if this process cannot open it."""
    if not reference.pid:
        return None
    try:
        return _SharedMemory(open_memfd(reference))
    except OSError as error:  # mostly because the client is on another host
        logger.debug("no memory is shared with process %d: %s", reference.pid, error)
        return None
