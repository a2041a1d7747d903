"""What travels between endpoints, and the transport that carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpidist.endpoint.address import Address
from mpidist.proto.mpidist_pb2 import Header

if TYPE_CHECKING:
    from mpidist.endpoint.endpoint import Endpoint

Array = NDArray[Any]


@dataclass(slots=True)
class Message:
    """A header and the buffers that follow it.

    Attributes:
        header: Who, what, and the sizes of the buffers.
        buffers: C-contiguous arrays; received ones have dtype uint8 unless the receiver chose them.
        peer: Whom it came from or goes to, in the transport's own terms.
    """

    header: Header
    buffers: Sequence[Array]
    peer: Any


class Transport(Protocol):
    """Carries messages between endpoints; the seam between the protocol and the wire."""

    protocol: str
    polled: bool  # whether messages arrive only while somebody calls progress()

    def attach(self, endpoint: Endpoint, number: int | None) -> int:
        """Local. Deliver messages for ``number``, or a free one, to the endpoint; the number."""

    def listen(self, number: int) -> int:
        """Local. Make sure that others can reach this number; the port of its address."""

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


def as_bytes(array: Array) -> Array:
    """Local. The memory of an array as a flat uint8 view.

    Raises:
        ValueError: The array is not C-contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError(
            f"a buffer must be C-contiguous, not {array.shape} with strides {array.strides}"
        )
    return array.reshape(-1).view(np.uint8)
