"""The connecting side of tcp: one socket for each peer, used by all endpoints of the process."""

from __future__ import annotations

import itertools
import logging
import time
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from mpidist.endpoint.curve import Keys
from mpidist.endpoint.frames import BadFrameError, is_small
from mpidist.endpoint.message import BYE, HELLO, LENT, REPLY, REQUEST, THANKS, WELCOME, Message
from mpidist.endpoint.tcp_shelves import Shelves
from mpidist.endpoint.tcp_wire import (
    GRACE_S,
    frames_of,
    hello_message,
    hello_of,
    is_readable,
    is_refusal,
    message_of,
    new_socket,
    receive_frames,
    send_frames,
)

logger = logging.getLogger(__name__)

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
_NUMBERS = itertools.count()
_ANEW = "the server was started anew; what it was asked may or may not be done"


class Link:
    """A connection that comes back by itself; its owner sees that one thread at a time uses it.

    What was asked and not yet answered is asked again after the connection was interrupted; the
    server knows what it has seen.

    Args:
        context: Of all sockets of the process.
        keys: See :class:`Keys`; None speaks in clear.
        host: Of the peer.
        port: Of the peer.
        own: This process's random name.
        shelves: For large buffers, if the peer is on this host.

    Attributes:
        loss: Why no reply can come any more; None as long as one can.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: Keys | None,
        host: str,
        port: int,
        own: bytes,
        shelves: Shelves,
    ) -> None:
        self._own = own
        self._shelves = shelves
        self._server: bytes | None = None
        self._unanswered: dict[int, Message] = {}
        self._settled: list[int] = []
        self._connections = 0
        self._broken_at: float | None = None
        self.loss: str | None = None
        self._socket = new_socket(context, zmq.DEALER)
        self._socket.routing_id = own + next(_NUMBERS).to_bytes(4)
        if keys is not None:
            keys.guard_link(self._socket)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(f"tcp://{host}:{port}")
        self._hello()

    def send(self, message: Message) -> None:
        """Local. Send a request or a notice."""
        if message.kind == REQUEST:
            self._unanswered[message.id] = message
        message.settled, self._settled = self._settled, []
        self._transmit(message)

    def forget(self, identity: int) -> None:
        """Local. A reply to this request is no longer waited for."""
        if self._unanswered.pop(identity, None) is not None:
            self._settled.append(identity)

    @property
    def descriptor(self) -> int:
        """What becomes readable when something arrives."""
        return int(self._socket.fileno())

    def has_arrived(self) -> bool:
        """Local. Whether something can be received."""
        return is_readable(self._socket)

    def receive(self) -> list[Message]:
        """Local. Replies that have arrived."""
        replies = []
        while self.loss is None and is_readable(self._socket):
            frames = receive_frames(self._socket)
            try:
                message = message_of(frames, self, self._shelves.take)
                if message.kind == WELCOME:
                    self._welcomed(message)
            except BadFrameError as error:
                logger.error("a server sent no message: %s", error)  # noqa: TRY400
                continue
            if message.kind == BYE:
                self.loss = "its endpoint was closed"
            elif message.kind == REPLY and is_refusal(message):
                self._refused()
            elif message.kind == REPLY and self._unanswered.pop(message.id, None) is not None:
                replies.append(message)
                self._settled.append(message.id)
                if not is_small(message.buffers):  # the server keeps large ones until then
                    self.send(Message(THANKS))
        return replies

    def look_for_losses(self) -> None:
        """Local. See whether the connection has broken, has come back, or will not."""
        now = time.monotonic()
        while is_readable(self._monitor):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._broken_at = None
                self._connections += 1
                if self._connections > 1:
                    self._resume()
            elif event == zmq.EVENT_DISCONNECTED:
                self._broken_at = self._broken_at or now
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
        """Local. Say goodbye, and close the socket once what was sent is on its way."""
        self.receive()  # perhaps the other side has said goodbye, too: then nobody listens
        self.look_for_losses()
        if self.loss is None:
            self._transmit(Message(BYE))
        self._socket.disable_monitor()
        self._monitor.close(0)
        gone = self.loss is not None or self._broken_at is not None
        self._socket.close(0 if gone else None)
        self._shelves.close()

    def _hello(self) -> None:
        self._transmit(hello_message(HELLO, self._own, self._shelves.offer()))

    def _refused(self) -> None:
        """Something overtook the hello: what was sent while the connection was broken goes first.

        Whoever has not welcomed us yet gets it again, behind the hello of the new connection.
        """
        if self._server is not None:
            self.loss = _ANEW

    def _welcomed(self, message: Message) -> None:
        if message.failure is not None:
            self.loss = message.failure.message
            return
        said = hello_of(message)
        if self._server not in (None, said.process):
            self.loss = _ANEW
        self._server = said.process
        self._shelves.settle(said)
        found = self._shelves.accept(said.memory)
        if said.HasField("memory"):
            self._transmit(hello_message(LENT, self._own, None, said.memory.token, found))

    def _resume(self) -> None:
        self._hello()
        for message in self._unanswered.values():
            self._transmit(message)

    def _transmit(self, message: Message) -> None:
        with suppress(zmq.Again):  # after a refusal there is no connection, and nothing to say
            send_frames(self._socket, frames_of(message, self._shelves.put))
