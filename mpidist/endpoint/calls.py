"""The requests of an endpoint that wait for their replies."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

from mpidist.endpoint.address import Address
from mpidist.endpoint.message import Array, Message, Transport
from mpidist.endpoint.request import Reply
from mpidist.errors import DeadlineExceededError, UnavailableError, from_code
from mpidist.proto.mpidist_pb2 import Header
from mpidist.runtime.backoff import Backoff
from mpidist.work import Work

logger = logging.getLogger(__name__)

# A reply is often not far: poll as long as a server does, then sleep less than it.
SPINS = 500
_SLEEPS_S = 2e-4

# How often somebody who waits asks whether the peer is still there.
_PEER_PERIOD_S = 0.5

# One sequence for all endpoints of the process: a number may be taken again while replies to its
# last owner are still on their way, and they must match no request of the new one.
_IDS = itertools.count(1)


class Calls:
    """Matches replies to requests, and ends those that get none.

    Args:
        transport: What the endpoint's messages travel by.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: dict[int, tuple[Work, Sequence[Array] | None]] = {}

    def begin(
        self,
        method: str,
        address: Address | str,
        peer: Any,
        into: Sequence[Array] | None,
        limit_s: float,
    ) -> tuple[int, Work]:
        """Local. A request that is about to be sent.

        Args:
            method: ``"service/Method"``.
            address: The receiver.
            peer: The receiver, in the transport's own terms.
            into: See :meth:`Endpoint.call`.
            limit_s: Seconds after which it fails.

        Returns:
            The request's id, and the Work that ends with the reply.
        """
        identity = next(_IDS)
        deadline = time.monotonic() + limit_s

        def drive(work: Work, until: float) -> None:
            error: Exception | None = None
            while error is None:
                now = time.monotonic()
                self.drive(work, min(until, deadline, now + _PEER_PERIOD_S))
                if work.is_completed():
                    return
                now = time.monotonic()
                if self._transport.has_left(peer):
                    error = UnavailableError(
                        f"no reply to {method} from {address}: the script there has ended"
                    )
                elif now >= deadline:
                    error = DeadlineExceededError(
                        f"no reply to {method} from {address} within {limit_s:g} s; the peer is "
                        "busy, stuck or gone (MPIDIST_CALL_TIMEOUT_S sets the limit)"
                    )
                elif now >= until:
                    return
            self.forget(identity)
            work.complete(error=error)

        work = Work(f"{method} to {address}", drive)
        self._pending[identity] = (work, into)
        return identity, work

    def forget(self, identity: int) -> None:
        """Local. A reply to this request is no longer waited for."""
        self._pending.pop(identity, None)

    def receive_into(self, header: Header) -> list[Array] | None:
        """Local. The caller's arrays for the buffers of a reply, if it gave some that fit."""
        entry = self._pending.get(header.id)
        into = entry[1] if entry is not None else None
        if into is None or [array.nbytes for array in into] != list(header.sizes):
            return None
        return list(into)

    def finish(self, message: Message) -> None:
        """Local. End the request that a reply answers."""
        header = message.header
        entry = self._pending.pop(header.id, None)
        if entry is None:
            logger.debug("reply %d to %s came after its deadline", header.id, header.method)
            return
        work, _ = entry
        if header.HasField("failure"):
            work.complete(error=from_code(header.failure.code, header.failure.message))
        else:
            work.complete(Reply(header.body, message.buffers))

    def fail_all(self, error: Exception) -> None:
        """Local. End all that still wait with an error."""
        for identity in list(self._pending):
            entry = self._pending.pop(identity, None)
            if entry is not None:
                entry[0].complete(error=error)

    def drive(self, work: Work, deadline: float) -> None:
        """Local. Move the transport along until a work has ended, or the deadline passes."""
        if not self._transport.polled:
            work.wait_for_event(deadline)
            return
        backoff = Backoff(SPINS, _SLEEPS_S)
        while not work.is_completed():
            if self._transport.progress():
                backoff.reset()
            elif time.monotonic() >= deadline:
                return
            else:
                backoff.pause()
