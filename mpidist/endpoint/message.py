"""What travels between endpoints, and the transport that carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mpidist.endpoint.address import Address
from mpidist.errors import type_name
from mpidist.proto.mpidist_pb2 import Failure

if TYPE_CHECKING:
    from mpidist.endpoint.endpoint import Endpoint

Array = NDArray[Any]

UINT8: np.dtype[Any] = np.dtype(np.uint8)
"""The dtype of received buffers; to look it up by its name takes as long as to make an array."""

REQUEST: Final = 0
"""Wants a reply."""
REPLY: Final = 1
"""Answers a request."""
NOTICE: Final = 2
"""Wants no reply."""
HELLO: Final = 3
"""Over tcp, first on a connection; the body is a Hello."""
WELCOME: Final = 4
"""Answers a hello, with a Hello or a failure."""
BYE: Final = 5
"""Over tcp: the sender closes the connection."""
THANKS: Final = 6
"""Over tcp: nothing but the settled replies."""
LENT: Final = 7
"""Over tcp, after a welcome; the body is a Hello that says whether its memory was found."""

NO_ENDPOINT: Final = 100
"""Code of a failure, beyond the canonical ones: the receiver has no endpoint of that number."""


@dataclass(slots=True, weakref_slot=True)
class Message:
    """A header, and the buffers that follow it.

    Attributes:
        kind: ``REQUEST`` or another of the constants.
        id: Of the request, unique to its sender.
        receiver: Number of an endpoint.
        sender: Number of an endpoint.
        method: ``"service/Method"``; of requests and notices.
        body: The method's own message, serialised.
        buffers: C-contiguous arrays; received ones have dtype uint8 unless the receiver chose them.
        peer: Whom it came from or goes to, in the transport's own terms.
        failure: Of a reply: set in place of a result.
        settled: Over tcp: requests whose replies have arrived since the last message.
        answering: True for a received request from when its answer is about to be sent.
        answered: True for a received request once its answer has been sent.
        placed: Of a request and its reply: the reply's buffers have arrays to go into.
    """

    kind: int
    id: int = 0
    receiver: int = 0
    sender: int = 0
    method: str = ""
    body: bytes = b""
    buffers: Sequence[Array] = ()
    peer: Any = None
    failure: Failure | None = None
    settled: Sequence[int] = ()
    answering: bool = False
    answered: bool = False
    placed: bool = False


class Transport(Protocol):
    """Carries messages between endpoints; the seam between the protocol and the wire."""

    protocol: str
    polled: bool  # whether messages are delivered only by those who call progress()
    spins: int  # how often those who linger() ask in vain before they sleep

    @property
    def linger(self) -> Callable[[], bool]:
        """As progress(), for who has nothing else to do: it may take some microseconds more."""

    def attach(self, endpoint: Endpoint, number: int | None) -> int:
        """Local. Deliver messages for ``number``, or a free one, to the endpoint; the number."""

    def listen(self, number: int) -> int:
        """Local. Make sure that others can reach this number; the port of its address.

        Raises:
            CancelledError: The number was detached, and would need a port.
        """

    def detach(self, number: int) -> None:
        """Local. Deliver nothing more to this number."""

    def host(self) -> str:
        """Local. The name of this host in addresses."""

    def resolve(self, address: Address) -> Any:
        """Local. The ``peer`` of messages to an address; DistNetworkError if there can be none."""

    def send(self, message: Message) -> None:
        """Local. Send; never waits for the receiver. Buffers must stay unchanged until a reply."""

    def forget(self, peer: Any, identity: int) -> None:
        """Local. A reply of the peer to this request is no longer waited for."""

    def loss(self, peer: Any) -> str | None:
        """Local. Why no reply can come from the peer any more, as a clause; None if one can."""

    def process_of(self, peer: Any) -> str:
        """Local. What the process at the other end of a received message is called."""

    def progress(self) -> bool:
        """Local. Deliver what has arrived; True if anything happened. Any thread may call it."""

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Local. Sleep until something may have arrived or been delivered.

        Args:
            seconds: At most so long.
            done: Whether there is no need to sleep; true after a delivery to the caller.

        Returns:
            False, at once, if this cannot be waited for and progress() must be asked.
        """


def check_buffers(buffers: Sequence[Array]) -> Sequence[Array]:
    """Local. The buffers themselves.

    Raises:
        TypeError: They are no list of NumPy arrays, or one holds Python objects.
        ValueError: One is not C-contiguous.
    """
    if isinstance(buffers, np.ndarray):
        raise TypeError("buffers must be a list of arrays, not one array: put it in brackets")
    for array in buffers:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"a buffer must be a NumPy array, not {type_name(array)}")
        if array.dtype.hasobject:
            raise TypeError(f"a buffer of dtype {array.dtype} holds Python objects")
        if not array.flags.c_contiguous:
            raise ValueError(
                f"a buffer must be C-contiguous, not {array.shape} with strides {array.strides}"
            )
    return buffers


def check_into(arrays: Sequence[Array]) -> None:
    """Local. An error, as of :func:`check_buffers`, if one of the arrays cannot receive a buffer.

    Raises:
        ValueError: One is read-only.
    """
    for array in check_buffers(arrays):
        if not array.flags.writeable:
            raise ValueError(f"an array to receive into is read-only: shape {array.shape}")


def as_bytes(array: Array) -> Array:
    """Local. The memory of a C-contiguous array as a flat uint8 view; ValueError for another."""
    if array.ndim == 1 and array.dtype is UINT8 and array.flags.c_contiguous:
        return array
    check_buffers((array,))
    return array.reshape(-1).view(np.uint8)
