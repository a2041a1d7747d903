"""The listening side of tcp: one socket an endpoint, and what is known of those who speak to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from mpidist.endpoint.answers import Answers
from mpidist.endpoint.curve import Keys
from mpidist.endpoint.frames import BadFrameError
from mpidist.endpoint.message import (
    BYE,
    HELLO,
    LENT,
    NOTICE,
    REPLY,
    REQUEST,
    WELCOME,
    Array,
    Message,
)
from mpidist.endpoint.tcp_shelves import Shelves
from mpidist.endpoint.tcp_wire import (
    GRACE_S,
    PROTOCOL,
    failed,
    frames_of,
    hello_message,
    hello_of,
    is_readable,
    message_of,
    new_socket,
    receive_frames,
    refused,
    send_frames,
)
from mpidist.errors import DistNetworkError, FailedPreconditionError

logger = logging.getLogger(__name__)

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_UNBIND_MS = 1000
_GONE = float("-inf")  # when a client was lost that said goodbye


@dataclass
class Client:
    """A process that has said hello.

    Attributes:
        process: Its own random name.
        handle: Descriptor of its connection, as the socket's monitor names it.
        answers: To its requests, which it may send again.
        shelves: For large buffers, if it is on this host.
        lost_at: When its connection broke, if it has not come back.
    """

    process: bytes
    handle: int
    shelves: Shelves
    answers: Answers = field(default_factory=Answers)
    lost_at: float | None = None


class Listener:
    """A bound socket; its owner sees to it that one thread at a time uses it.

    Args:
        context: Of all sockets of the process.
        keys: Guard it, and let it listen to other hosts; without them it listens to this one only.
        port: To bind; None takes a free one.
        own: This process's random name.
        new_shelves: Makes those of a client.

    Attributes:
        port: That it is bound to.
        closed: Whether it can send no more.

    Raises:
        DistNetworkError: The port is in use, or may not be used.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: Keys | None,
        port: int | None,
        own: bytes,
        new_shelves: Callable[[], Shelves],
    ) -> None:
        self.closed = False
        self._new_shelves = new_shelves
        self._own = own
        self._clients: dict[bytes, Client] = {}
        self._open: set[int] = set()  # handles of connections
        self._reported = False
        self._socket = new_socket(context, zmq.ROUTER)
        self._socket.router_handover = True  # a client that comes back takes its name with it
        if keys is not None:
            keys.guard_listener(self._socket)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
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

    @property
    def descriptor(self) -> int:
        """What becomes readable when something arrives."""
        return int(self._socket.fileno())

    def has_arrived(self) -> bool:
        """Local. Whether something can be received."""
        return is_readable(self._socket)

    def receive(self) -> list[Message]:
        """Local. Requests and notices that have arrived; answers hellos and repeated requests."""
        messages = []
        while is_readable(self._socket):
            frames = receive_frames(self._socket)
            try:
                message = self._message(frames)
            except BadFrameError as error:
                self._report(frames, error)
                continue
            if message is not None:
                messages.append(message)
        return messages

    def send(self, name: bytes, message: Message) -> None:
        """Local. Answer a client; what it may ask for again is kept."""
        client = self._clients.get(name)
        if client is not None and message.kind == REPLY:
            client.answers.store(message.id, message)
        put = None if client is None else client.shelves.put
        send_frames(self._socket, [name, *frames_of(message, put)])

    def process_of(self, name: bytes) -> str:
        """Local. What a client is called in events."""
        client = self._clients.get(name)
        return client.process.hex() if client is not None else name.hex()

    def look_for_losses(self) -> list[str]:
        """Local. Processes that said goodbye, or have been away for too long.

        One that has connected once more meanwhile, under another name, is none of them.
        """
        self._note_ends()
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
        """Local. Tell the clients, and close the socket once what was sent is on its way."""
        self.closed = True
        for name in self._clients:
            send_frames(self._socket, [name, *frames_of(Message(BYE))])
        self._free_port()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        for client in self._clients.values():
            client.shelves.close()

    def _free_port(self) -> None:
        """Wait until the port can be bound again, which another thread sees to."""
        with suppress(zmq.ZMQError):  # it is not bound
            self._socket.unbind(bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)))
            while self._monitor.poll(_UNBIND_MS):
                if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_CLOSED:
                    return

    def _message(self, frames: list[zmq.Frame]) -> Message | None:
        name = frames[0].bytes
        if len(frames) < 2:
            raise BadFrameError("no frame came with the name")
        client = self._clients.get(name)
        take = _nothing_lent if client is None else client.shelves.take
        message = message_of(frames[1:], (self, name), take)
        if message.kind == HELLO:
            self._welcome(name, message, frames[1].get(zmq.SRCFD))
            return None
        if client is None:
            if message.kind == REQUEST:
                self.send(name, refused(message))
            return None
        if client.lost_at == _GONE:  # it has said goodbye
            return None
        client.lost_at = None
        client.answers.settle(message.settled)
        if message.kind == BYE:
            client.lost_at = _GONE
            return None
        if message.kind == LENT:
            client.shelves.settle(hello_of(message))
        if message.kind not in (REQUEST, NOTICE):
            return None
        if message.kind == NOTICE or client.answers.admit(message.id):
            return message
        answer = client.answers.get(message.id)
        if answer is not None:
            self.send(name, answer)
        return None

    def _welcome(self, name: bytes, hello: Message, handle: int) -> None:
        said = hello_of(hello)
        if said.protocol != PROTOCOL:
            error = FailedPreconditionError(
                f"the server speaks protocol {PROTOCOL} and the client {said.protocol} (mpidist "
                f"{said.version}): install the same version of mpidist on both sides"
            )
            welcome = hello_message(WELCOME, self._own)
            welcome.failure = failed(hello, error).failure
        else:
            # Before its handle is known: who had that before may have ended just now.
            self._note_ends()
            client = self._clients.get(name)
            if client is None:
                client = Client(said.process, handle, self._new_shelves())
                self._clients[name] = client
            client.handle = handle
            client.lost_at = None if handle in self._open else time.monotonic()
            shelves = client.shelves
            shelves.close()  # of a connection before
            found = shelves.accept(said.memory)
            own = shelves.offer() if found else None
            welcome = hello_message(WELCOME, self._own, own, said.memory.token, found)
        self.send(name, welcome)

    def _note_ends(self) -> None:
        """Take note of connections that have begun or ended."""
        now = time.monotonic()
        while is_readable(self._monitor):
            event = recv_monitor_message(self._monitor)
            handle = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open.add(handle)
                continue
            self._open.discard(handle)
            for client in self._clients.values():
                if client.handle == handle and client.lost_at is None:
                    client.lost_at = now

    def _report(self, frames: list[zmq.Frame], error: BadFrameError) -> None:
        level = logging.DEBUG if self._reported else logging.ERROR
        self._reported = True  # whoever sends garbage sends much of it
        origin = frames[0].bytes.hex()
        logger.log(level, "tcp port %d: client %s sent no message: %s", self.port, origin, error)


def _nothing_lent(place: int, sizes: Sequence[int]) -> list[Array]:
    raise BadFrameError("a client that has not said hello has lent no memory")
