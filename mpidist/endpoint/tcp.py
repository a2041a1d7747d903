"""Messages between processes of any hosts, over ZeroMQ sockets.

An endpoint that serves listens at its own port; it begins to when its address is asked for. All
endpoints of a process share one connection to each peer. Without a shared secret (MPIDIST_SECRET)
only this host is spoken to; with one everything is encrypted, and nobody without it gets as far as
a message. Connections that break come back by themselves, unless the peer is away for too long.
Large buffers between processes of one host that see each other travel through shared memory.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

import zmq

from mpidist.config import config
from mpidist.endpoint.address import Address, is_loopback
from mpidist.endpoint.curve import Keys
from mpidist.endpoint.doorbell import Doorbell
from mpidist.endpoint.message import Message
from mpidist.endpoint.tcp_link import Link
from mpidist.endpoint.tcp_listener import Listener
from mpidist.endpoint.tcp_shelves import Shelves
from mpidist.endpoint.tcp_wire import keep_freed_memory
from mpidist.errors import (
    CancelledError,
    DistNetworkError,
    InvalidArgumentError,
    PermissionDeniedError,
)
from mpidist.runtime import fork

if TYPE_CHECKING:
    from mpidist.endpoint.endpoint import Endpoint

_FIRST_NUMBER = 1 << 16  # above every port
_LOOK_PERIOD_S = 0.02


class TcpTransport:
    """The endpoints of this process, and their sockets; use :func:`tcp_transport`.

    Args:
        secret: Known to all processes that may speak to each other; None speaks in clear, on this
            host alone.
    """

    protocol = "tcp"
    polled = True
    spins = 50  # not for long: ZeroMQ's own threads need the cores

    def __init__(self, secret: str | None) -> None:
        self._keys = Keys.derive(secret) if secret else None
        keep_freed_memory()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._process = os.urandom(16)
        self._numbers = itertools.count(_FIRST_NUMBER)
        self._endpoints: dict[int, Endpoint] = {}
        self._listeners: dict[int, Listener] = {}
        self._links: dict[tuple[str, int], Link] = {}
        self._sockets = threading.Lock()
        self._receiving = threading.Lock()
        self._doorbell = Doorbell()
        self._looked_at = 0.0
        atexit.register(self.close)
        fork.in_parent_only(lambda: atexit.unregister(self.close))

    def attach(self, endpoint: Endpoint, number: int | None) -> int:
        """Local. See :class:`Transport`; a given number is a port to listen at."""
        fork.check()
        if number is not None and not 0 < number < _FIRST_NUMBER:
            raise InvalidArgumentError(f"over tcp a number is a port, 1 to 65535, not {number}")
        with self._sockets:
            if number is None:
                number = next(self._numbers)
            elif number in self._endpoints:
                raise DistNetworkError(f"tcp://{self.host()}:{number} is in use already")
            else:
                self._listen(number, number)
            self._endpoints[number] = endpoint
        return number

    def listen(self, number: int) -> int:
        """Local. See :class:`Transport`; the port that is listened at from now on."""
        with self._sockets:
            if number not in self._endpoints:
                raise CancelledError(f"endpoint number {number} over tcp is closed: it has no port")
            return self._listen(number, None).port

    def detach(self, number: int) -> None:
        """Local. See :class:`Transport`."""
        with self._sockets:
            self._endpoints.pop(number, None)
            if not self._endpoints:  # before the listener: this process may have called itself
                self._close_links()
            listener = self._listeners.pop(number, None)
            if listener is not None:
                self._doorbell.ignore(listener.descriptor)
                listener.close()

    def host(self) -> str:
        """Local. The name of this host, or ``localhost`` where only that is listened to."""
        return "localhost" if self._keys is None else socket.gethostname()

    def resolve(self, address: Address) -> Link:
        """Local. The connection to an address, made if there is none."""
        if self._keys is None and not is_loopback(address.host):
            raise PermissionDeniedError(
                f"{address} is on another host: over tcp that needs a secret that both sides know; "
                "set MPIDIST_SECRET there and here"
            )
        key = (address.host, address.port)
        with self._sockets:
            link = self._links.get(key)
            if link is None or link.loss is not None:
                if link is not None:
                    self._close_link(self._links.pop(key))
                try:
                    link = Link(self._context, self._keys, *key, self._process, _new_shelves())
                except zmq.ZMQError as error:
                    raise DistNetworkError(f"cannot connect to {address}: {error}") from None
                self._links[key] = link
                self._doorbell.watch(link.descriptor)
        return link

    def process_of(self, peer: tuple[Listener, bytes]) -> str:
        """Local. See :class:`Transport`."""
        return peer[0].process_of(peer[1])

    def send(self, message: Message) -> None:
        """Local. See :class:`Transport`."""
        fork.check()
        with self._sockets:
            sender: Link | Listener
            if isinstance(message.peer, Link):
                sender = message.peer
                sender.send(message)
            else:
                sender, name = cast("tuple[Listener, bytes]", message.peer)
                if sender.closed:  # an answer that comes too late
                    return
                sender.send(name, message)
            # Sending takes note of what has arrived meanwhile: its descriptor stays silent then.
            if self._doorbell.waiting and sender.has_arrived():
                self._doorbell.ring()

    def forget(self, peer: Link, identity: int) -> None:
        """Local. See :class:`Transport`."""
        with self._sockets:
            peer.forget(identity)

    def loss(self, peer: Link) -> str | None:
        """Local. See :class:`Transport`."""
        return peer.loss

    def progress(self) -> bool:
        """Local. See :class:`Transport`; gives False at once if another thread is at it."""
        if not self._receiving.acquire(blocking=False):
            return False
        try:
            arrived = self._receive()
            for endpoint, message in arrived:
                endpoint.deliver(message)
        finally:
            self._receiving.release()
        if arrived:
            self._doorbell.ring()
        return bool(arrived)

    linger = progress

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Local. See :class:`Transport`."""
        self._doorbell.wait(seconds, done)
        return True

    def close(self) -> None:
        """Local. Close everything; what has been sent gets a little time to leave."""
        for endpoint in list(self._endpoints.values()):
            endpoint.close()
        with self._sockets:
            self._close_links()
        self._context.term()
        self._doorbell.close()

    def _listen(self, number: int, port: int | None) -> Listener:
        listener = self._listeners.get(number)
        if listener is None:
            listener = Listener(self._context, self._keys, port, self._process, _new_shelves)
            self._listeners[number] = listener
            self._doorbell.watch(listener.descriptor)
        return listener

    def _receive(self) -> list[tuple[Endpoint, Message]]:
        arrived = []
        with self._sockets:
            for number, listener in self._listeners.items():
                endpoint = self._endpoints.get(number)
                if endpoint is not None:
                    arrived += [(endpoint, message) for message in listener.receive()]
            for link in list(self._links.values()):
                for message in link.receive():
                    endpoint = self._endpoints.get(message.receiver)
                    if endpoint is not None:
                        arrived.append((endpoint, message))
            now = time.monotonic()
            if now - self._looked_at > _LOOK_PERIOD_S:
                self._looked_at = now
                self._look_for_losses()
        return arrived

    def _look_for_losses(self) -> None:
        for link in self._links.values():
            link.look_for_losses()
        for number, listener in self._listeners.items():
            for process in listener.look_for_losses():
                self._endpoints[number].lose(process)
                self._doorbell.ring()

    def _close_links(self) -> None:
        for link in self._links.values():
            self._close_link(link)
        self._links.clear()

    def _close_link(self, link: Link) -> None:
        self._doorbell.ignore(link.descriptor)
        link.close()


def _new_shelves() -> Shelves:
    return Shelves(config.shelf_bytes)


@cache
def tcp_transport() -> TcpTransport:
    """Local. The transport of this process."""
    return TcpTransport(config.secret)
