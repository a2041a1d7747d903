"""Messages between endpoints, and the replies that users see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from numpy.typing import NDArray

from mpidist.proto.mpidist_pb2 import Failure

Array = NDArray[Any]

# Kinds of messages.
REQUEST: Final = 0
"""Expects a reply."""
REPLY: Final = 1
"""Answers a request."""
NOTICE: Final = 2
"""Expects no reply."""
HELLO: Final = 3
"""The first message of a tcp connection. Its body is a Hello."""
HELLO_ACK: Final = 4
"""Answers a HELLO or RESUME. It carries a failure if the server refuses the connection."""
CLOSE: Final = 5
"""The sender closes the tcp connection."""
ACK: Final = 6
"""Carries ids of ended requests (``acks``), and nothing else. Used over tcp."""
RESUME: Final = 7
"""The first message of a tcp connection that replaces a broken one. Its body is a Hello."""

NO_ENDPOINT: Final = 100
"""Failure code, beside the canonical ones: the receiving rank has no endpoint of that number."""


@dataclass(slots=True)
class Message:
    """A header and the buffers that follow it.

    Attributes:
        kind: ``REQUEST`` or another kind.
        id: Id of the request, unique in the sending process.
        receiver: Number of the receiving endpoint.
        sender: Number of the sending endpoint.
        method: ``"service/Method"``, in requests and notices.
        body: The method's own message, serialised.
        buffers: C-contiguous arrays. Received buffers have dtype uint8, unless the receiver
            provided the arrays.
        peer: The other side, in the transport's own terms. failure: The error that a reply carries
            in place of a result. acks: Used over tcp: ids of requests that have ended at the client
            since its last message. In a HELLO or RESUME the ids of the requests without replies.
        has_output_buffers: True if the caller provides arrays for the buffers of the reply.
        copies_buffers: True if the caller may change the buffers after ``send`` returns. A
            transport that reads the buffers later must copy them.
        reply_started: True for a received request once its reply is about to be sent.
        replied: True for a received request once its reply has been sent.
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
    acks: Sequence[int] = ()
    has_output_buffers: bool = False
    copies_buffers: bool = False
    reply_started: bool = False
    replied: bool = False

    def own_buffers(self) -> None:
        """Copy the buffers if the caller may change the originals."""
        if self.copies_buffers:
            self.buffers = [array.copy() for array in self.buffers]
            self.copies_buffers = False


@dataclass(slots=True)
class Reply:
    """The result of a request. A handler returns it, and a call's Work provides it.

    Attributes:
        body: The method's own message, serialised.
        buffers: C-contiguous arrays. Received buffers are flat uint8 arrays, or the arrays that
            the caller provided as ``into``. Never change the arrays of a handler's reply: the
            transport may read them at any later time.
    """

    body: bytes = b""
    buffers: Sequence[Array] = field(default_factory=tuple)


LATER = Reply()
"""A handler returns this to defer its reply. It replies through the :class:`Request` later."""
