"""Requests and replies, as handlers see them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from mpidist.endpoint.message import Array, Message
from mpidist.errors import InvalidArgumentError, OpError, UnknownError
from mpidist.proto.mpidist_pb2 import Failure

if TYPE_CHECKING:
    from mpidist.endpoint.services import Services

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reply:
    """What a handler answers, and what a call's Work gives.

    Attributes:
        body: The method's own message, serialised.
        buffers: C-contiguous arrays; received ones are flat uint8, or the call's ``into``.
    """

    body: bytes = b""
    buffers: Sequence[Array] = field(default_factory=tuple)


LATER = Reply()
"""Returned by a handler that answers later, through its :class:`Request`."""


@dataclass(slots=True)
class Request:
    """A request, or a notice, as its handler sees it.

    Attributes:
        method: ``"service/Method"``.
        body: The method's own message, serialised.
        buffers: Flat uint8 arrays; over inproc the sender's own arrays.
    """

    method: str
    body: bytes
    buffers: Sequence[Array]
    _services: Services
    _message: Message

    @property
    def process(self) -> str:
        """Name of the process it came from; see :meth:`Endpoint.on_peer_lost`."""
        return self._services.process_of(self._message)

    def reply(self, body: bytes = b"", buffers: Sequence[Array] = ()) -> None:
        """Send the answer, from any thread. A second answer is logged as an error, and dropped."""
        self._services.answer(self._message, Reply(body, buffers), None)

    def fail(self, error: BaseException) -> None:
        """Answer with an error; an OpError arrives as the same class.

        After another answer the error is logged, with its traceback, and not sent.
        """
        self._services.answer(self._message, Reply(), error)


Handler = Callable[[Request], Reply | None]


def failure_of(error: BaseException, method: str, address: str) -> Failure:
    """Local. What a caller is told of an error that a handler raised.

    Args:
        error: The error; an OpError arrives as the same class, a ValueError, a TypeError or a body
            that cannot be read as InvalidArgumentError, any other as UnknownError, and is logged
            here with its traceback.
        method: The method.
        address: Of the endpoint.
    """
    if isinstance(error, OpError):
        return Failure(code=error.code, message=error.message)
    if isinstance(error, ValueError | TypeError | DecodeError):
        code = InvalidArgumentError.code
    else:
        code = UnknownError.code
        logger.error("%s: %s failed", address, method, exc_info=error)
    return Failure(code=code, message=f"{type(error).__name__}: {error} (in {method} at {address})")
