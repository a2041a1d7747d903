"""The two protocols between an endpoint and the transport that carries its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpidist.rpc.address import Address
from mpidist.rpc.message import Array, Message


class Receiver(Protocol):
    """Accepts incoming messages. Transports call it on any thread."""

    def deliver(self, message: Message) -> None:
        """Complete a call by a reply, or queue a message for the serving thread. Do not block."""

    def output_buffers(self, message: Message, sizes: Sequence[int]) -> Sequence[Array] | None:
        """Return the caller's arrays for the buffers of a reply; None if there are none that fit.

        Args:
            message: The reply, without its buffers.
            sizes: Size of each buffer in bytes.
        """

    def peer_lost(self, process: str) -> None:
        """Queue the loss of a process, behind the messages of the process."""

    def close(self) -> None:
        """Close the endpoint, because the transport ends."""


class Transport(Protocol):
    """Carries messages between endpoints."""

    protocol: str
    needs_polling: bool  # messages are delivered only while a thread calls progress()
    spin_count: int  # fruitless polls before a waiting thread sleeps

    def attach(self, receiver: Receiver, number: int | None) -> int:
        """Deliver messages for an endpoint number to a receiver. Return the number.

        Args:
            receiver: The endpoint.
            number: Its number; None takes a free one.
        """

    def listen(self, number: int) -> int:
        """Make an endpoint number reachable. Return the port of its address.

        Raises:
            CancelledError: The number was detached, and has no port.
        """

    def detach(self, number: int) -> None:
        """Deliver no more messages to an endpoint number."""

    def host(self) -> str:
        """Return the name of this host in addresses."""

    def resolve(self, address: Address) -> Any:
        """Return the ``peer`` of messages to an address.

        Raises:
            DistNetworkError: The address cannot belong to an endpoint.
            PermissionDeniedError: Over tcp, the host is another one, and there is no secret.
        """

    def send(self, message: Message) -> None:
        """Send a message without waiting for the receiver.

        The transport may read the buffers after this call. The buffers of a request must stay
        unchanged until its reply arrives, other buffers for ever.
        """

    def forget(self, peer: Any, request_id: int) -> None:
        """Stop waiting for the reply of a peer to a request."""

    def loss(self, peer: Any) -> str | None:
        """Return why a peer cannot reply any more, as a clause; None if it can."""

    def is_connected(self, address: Address) -> bool:
        """Return whether a message to the address can arrive now. Opens no connection."""

    def process_of(self, peer: Any) -> str:
        """Return the name of the process that sent a message."""

    def progress(self) -> bool:
        """Deliver the messages that have arrived. Return True if anything happened."""

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Sleep until a message may have arrived or been delivered.

        Args:
            seconds: Upper limit.
            done: Returns True if the thread need not sleep. If something other than a delivery
                makes it true, the thread may still sleep for ``seconds``.

        Returns:
            False if the transport cannot wake a sleeping thread. The call then returns at once.
        """
