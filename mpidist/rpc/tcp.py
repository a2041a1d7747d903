"""The transport between processes of any hosts: ZeroMQ sockets.

An endpoint that serves has a port of its own. The port opens with the endpoint if its number is
given, else when the address is first read. All endpoints of a process share one connection to each
server address. Without a shared secret (MPIDIST_SECRET)
only this host can be reached. With one, everything is encrypted, and a process without it cannot
send a message. Connections that break resume by themselves, unless the peer is away for too long.
Large buffers between processes of one host, user and process namespace go through shared memory.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import cache, partial

import zmq
from zmq.utils import z85

from mpidist.config import config
from mpidist.errors import (
    CancelledError,
    DistNetworkError,
    InvalidArgumentError,
    PermissionDeniedError,
)
from mpidist.host_memory import keep_freed_memory
from mpidist.mpi import fork
from mpidist.rpc.address import Address, is_loopback
from mpidist.rpc.message import Message
from mpidist.rpc.tcp_connection import Connection, Listener, Session, TcpContext
from mpidist.rpc.transport import Receiver
from mpidist.rpc.waker import Waker

_FIRST_NUMBER = 1 << 16  # above all ports
_CHECK_PERIOD_S = 0.02


class TcpTransport:
    """The endpoints of this process and their sockets. Use :func:`tcp_transport`.

    Args:
        secret: Secret of all processes that may reach each other. None leaves messages in clear,
            and reaches only this host.
    """

    protocol = "tcp"
    needs_polling = True
    spin_count = 50  # few, because ZeroMQ's own threads need the cores

    def __init__(self, secret: str | None) -> None:
        keys = _derive_keys(secret) if secret else None
        keep_freed_memory()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
        self._context = TcpContext(context, Waker(), keys, os.urandom(16))
        self._waker = self._context.waker
        self._numbers = itertools.count(_FIRST_NUMBER)
        self._receivers: dict[int, Receiver] = {}
        self._listeners: dict[int, Listener] = {}
        self._connections: dict[tuple[str, int], Connection] = {}
        self._socket_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._checked_at = 0.0
        atexit.register(self.close)
        fork.in_parent_only(lambda: atexit.unregister(self.close))

    def attach(self, receiver: Receiver, number: int | None) -> int:
        """See :class:`Transport`; a given number is a port to listen at."""
        fork.check()
        if number is not None and not 0 < number < _FIRST_NUMBER:
            raise InvalidArgumentError(f"over tcp a number is a port, 1 to 65535, not {number}")
        with self._socket_lock:
            if number is None:
                number = next(self._numbers)
            elif number in self._receivers:
                raise DistNetworkError(f"tcp://{self.host()}:{number} is in use already")
            else:
                self._listeners[number] = Listener(self._context, number)
            self._receivers[number] = receiver
        return number

    def listen(self, number: int) -> int:
        """Return the port of an endpoint, which is open from now on."""
        with self._socket_lock:
            if number not in self._receivers:
                raise CancelledError(f"endpoint number {number} over tcp is closed: it has no port")
            if number not in self._listeners:
                self._listeners[number] = Listener(self._context, None)
            return self._listeners[number].port

    def detach(self, number: int) -> None:
        """See :class:`Transport`."""
        with self._socket_lock:
            self._receivers.pop(number, None)
            if not self._receivers:  # before the listener: this process may have called itself
                self._close_connections()
            listener = self._listeners.pop(number, None)
            if listener is not None:
                listener.close()

    def host(self) -> str:
        """Return the name of this host, or ``localhost`` if no other host can reach it."""
        return "localhost" if self._context.keys is None else socket.gethostname()

    def resolve(self, address: Address) -> Connection:
        """Return the connection to an address, a new one if there is none."""
        if self._context.keys is None and not is_loopback(address.host):
            raise PermissionDeniedError(
                f"{address} is on another host: over tcp that needs a secret that both sides know; "
                "set MPIDIST_SECRET there and here"
            )
        key = (address.host, address.port)
        with self._socket_lock:
            connection = self._connections.get(key)
            if connection is None or connection.loss is not None:
                if connection is not None:
                    self._connections.pop(key).close()
                try:
                    connection = self._connections[key] = Connection(self._context, *key)
                except zmq.ZMQError as error:
                    raise DistNetworkError(f"cannot connect to {address}: {error}") from None
        return connection

    def is_connected(self, address: Address) -> bool:
        """Return whether the connection to an address is open; see :class:`Transport`."""
        connection = self._connections.get((address.host, address.port))
        return connection is not None and connection.is_open and connection.loss is None

    def process_of(self, peer: Session) -> str:
        """See :class:`Transport`."""
        return peer.process

    def send(self, message: Message) -> None:
        """See :class:`Transport`."""
        fork.check()
        with self._socket_lock:
            message.peer.send(message)  # a Connection, or the Session of a request

    def forget(self, peer: Connection, request_id: int) -> None:
        """See :class:`Transport`."""
        with self._socket_lock:
            peer.forget(request_id)

    def loss(self, peer: Connection) -> str | None:
        """See :class:`Transport`."""
        return peer.loss

    def progress(self) -> bool:
        """See :class:`Transport`; returns False at once if another thread polls."""
        if not self._receive_lock.acquire(blocking=False):
            return False
        try:
            arrived = self._receive()
            for deliver in arrived:
                deliver()
        finally:
            self._receive_lock.release()
        if arrived:
            self._waker.wake()
        return bool(arrived)

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """See :class:`Transport`."""
        self._waker.wait(seconds, done)
        return True

    def close(self) -> None:
        """Close everything. Messages that were sent get a little time to leave."""
        for receiver in list(self._receivers.values()):
            receiver.close()
        with self._socket_lock:
            self._close_connections()
        self._context.zmq.term()
        self._waker.close()

    # Inside

    def _receive(self) -> list[Callable[[], None]]:
        """Return the deliveries of the messages that have arrived, and of lost processes."""
        arrived: list[Callable[[], None]] = []
        with self._socket_lock:
            now = time.monotonic()
            must_check = now - self._checked_at > _CHECK_PERIOD_S
            if must_check:
                self._checked_at = now
            for number, listener in self._listeners.items():
                receiver = self._receivers[number]
                arrived += [partial(receiver.deliver, one) for one in listener.receive()]
                if must_check:  # a lost process is delivered behind its last requests
                    arrived += [partial(receiver.peer_lost, one) for one in listener.check()]
            for connection in list(self._connections.values()):
                for message in connection.receive():
                    if message.receiver in self._receivers:
                        arrived.append(partial(self._receivers[message.receiver].deliver, message))
                if must_check:
                    connection.check()
        return arrived

    def _close_connections(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def _derive_keys(secret: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key of all servers that know a secret."""
    digest = hashlib.blake2b(secret.encode(), digest_size=32, person=b"mpidist-server")
    text = z85.encode(digest.digest())
    return zmq.curve_public(text), text


@cache
def tcp_transport() -> TcpTransport:
    """Return the transport of this process."""
    return TcpTransport(config.secret)
