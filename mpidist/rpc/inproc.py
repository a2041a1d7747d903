"""The transport between threads of one process: delivery at once, by reference."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from mpidist.errors import DistNetworkError, UnavailableError
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.rpc.address import Address, is_loopback
from mpidist.rpc.message import REPLY, REQUEST, Message
from mpidist.rpc.transport import Receiver


class InprocTransport:
    """The endpoints of this process by number. Use :func:`inproc_transport`."""

    protocol = "inproc"
    needs_polling = False
    spin_count = 0

    def __init__(self) -> None:
        self._receivers: dict[int, Receiver] = {}
        self._lock = threading.Lock()

    def attach(self, receiver: Receiver, number: int | None) -> int:
        """See :class:`Transport`; a number in use is a DistNetworkError."""
        with self._lock:
            if number is None:
                number = next(n for n in itertools.count(1) if n not in self._receivers)
            elif number in self._receivers:
                raise DistNetworkError(f"inproc://{self.host()}:{number} is in use already")
            self._receivers[number] = receiver
        return number

    def listen(self, number: int) -> int:
        """See :class:`Transport`."""
        return number

    def detach(self, number: int) -> None:
        """See :class:`Transport`; the other endpoints lose this one."""
        # The lock is held until all know, because another endpoint may take the number next.
        with self._lock:
            self._receivers.pop(number, None)
            for receiver in self._receivers.values():
                receiver.peer_lost(self.process_of(number))

    def host(self) -> str:
        """Return ``localhost``: the addresses have no meaning outside the process."""
        return "localhost"

    def serves(self, address: Address) -> bool:
        """Return True if an address, of any protocol, belongs to an endpoint of this process."""
        is_here = is_loopback(address.host) or address.host == socket.gethostname()
        return is_here and address.port in self._receivers

    def resolve(self, address: Address) -> int:
        """See :class:`Transport`; an address without an endpoint is a DistNetworkError."""
        if address.port not in self._receivers:
            known = ", ".join(str(n) for n in sorted(self._receivers)) or "none"
            raise DistNetworkError(
                f"nothing serves {address} in this process; inproc endpoints here: {known} (the "
                "addresses of endpoints in other processes begin with tcp:// or mpi://)"
            )
        return address.port

    def send(self, message: Message) -> None:
        """See :class:`Transport`; a request to an endpoint that has closed fails at once."""
        receiver = self._receivers.get(message.peer)
        if receiver is None:
            self._refuse(message)
            return
        message.own_buffers()
        receiver.deliver(replace(message, peer=message.sender))

    def _refuse(self, message: Message) -> None:
        sender = self._receivers.get(message.sender)
        if message.kind != REQUEST or sender is None:
            return
        failure = Failure(
            code=UnavailableError.code,
            message=f"inproc://{self.host()}:{message.receiver} was closed before {message.method}",
        )
        sender.deliver(Message(REPLY, message.id, peer=message.receiver, failure=failure))

    def forget(self, peer: int, request_id: int) -> None:
        """See :class:`Transport`; nothing is sent twice, so there is nothing to forget."""

    def loss(self, peer: int) -> str | None:
        """Return None: an endpoint that closes refuses the requests without replies."""
        return None

    def is_connected(self, address: Address) -> bool:
        """Return whether an endpoint has the address; see :class:`Transport`."""
        return address.port in self._receivers

    def process_of(self, peer: int) -> str:
        """See :class:`Transport`."""
        return f"inproc://{self.host()}:{peer}"

    def progress(self) -> bool:
        """Return False: sending delivers."""
        return False

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Return False without sleeping: ``deliver`` wakes waiting threads."""
        return False


@cache
def inproc_transport() -> InprocTransport:
    """Return the transport of this process."""
    return InprocTransport()
