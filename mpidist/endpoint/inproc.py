"""Messages between threads of one process: delivered at once, by reference."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from mpidist.endpoint.address import Address, is_loopback
from mpidist.endpoint.message import REPLY, REQUEST, Message
from mpidist.errors import DistNetworkError, UnavailableError
from mpidist.proto.mpidist_pb2 import Failure

if TYPE_CHECKING:
    from mpidist.endpoint.endpoint import Endpoint


class InprocTransport:
    """The endpoints of this process by number; use :func:`inproc_transport`."""

    protocol = "inproc"
    polled = False
    spins = 0

    def __init__(self) -> None:
        self._endpoints: dict[int, Endpoint] = {}
        self._lock = threading.Lock()

    def attach(self, endpoint: Endpoint, number: int | None) -> int:
        """Local. See :class:`Transport`; a number in use is a DistNetworkError."""
        with self._lock:
            if number is None:
                number = next(n for n in itertools.count(1) if n not in self._endpoints)
            elif number in self._endpoints:
                raise DistNetworkError(f"inproc://{self.host()}:{number} is in use already")
            self._endpoints[number] = endpoint
        return number

    def listen(self, number: int) -> int:
        """Local. See :class:`Transport`."""
        return number

    def detach(self, number: int) -> None:
        """Local. See :class:`Transport`; the others lose it."""
        with self._lock:  # until all know: the next one with this number is another
            self._endpoints.pop(number, None)
            for endpoint in self._endpoints.values():
                endpoint.lose(self.process_of(number))

    def host(self) -> str:
        """Local. Always ``localhost``: the addresses mean nothing outside the process."""
        return "localhost"

    def serves(self, address: Address) -> bool:
        """Local. Whether an address is one of an endpoint here, whatever its protocol."""
        return address.port in self._endpoints and _is_here(address.host)

    def resolve(self, address: Address) -> int:
        """Local. See :class:`Transport`; an address without an endpoint is a DistNetworkError."""
        if address.port not in self._endpoints:
            known = ", ".join(str(n) for n in sorted(self._endpoints)) or "none"
            raise DistNetworkError(
                f"nothing serves {address} in this process; inproc endpoints here: {known} (what "
                "another process serves has an address that begins with tcp:// or mpi://)"
            )
        return address.port

    def send(self, message: Message) -> None:
        """Local. See :class:`Transport`; a request whose receiver is gone fails at once."""
        receiver = self._endpoints.get(message.peer)
        if receiver is None:
            self._refuse(message)
            return
        receiver.deliver(replace(message, peer=message.sender))

    def _refuse(self, message: Message) -> None:
        sender = self._endpoints.get(message.sender)
        if message.kind != REQUEST or sender is None:
            return
        failure = Failure(
            code=UnavailableError.code,
            message=f"inproc://{self.host()}:{message.receiver} was closed before {message.method}",
        )
        sender.deliver(Message(REPLY, message.id, peer=message.receiver, failure=failure))

    def forget(self, peer: int, identity: int) -> None:
        """Local. Nothing to do: nothing is sent twice."""

    def loss(self, peer: int) -> str | None:
        """Local. Always None: an endpoint that is closed refuses what it has not answered."""
        return None

    def process_of(self, peer: int) -> str:
        """Local. See :class:`Transport`."""
        return f"inproc://{self.host()}:{peer}"

    def progress(self) -> bool:
        """Local. Always False: sending delivers."""
        return False

    linger = progress

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Local. Always False: those who wait are woken by the delivery itself."""
        return False


def _is_here(host: str) -> bool:
    return is_loopback(host) or host == socket.gethostname()


@cache
def inproc_transport() -> InprocTransport:
    """Local. The transport of this process."""
    return InprocTransport()
