"""The requests of an endpoint that wait for their replies."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.config import config
from mpidist.endpoint.credits import Credits, Shipment
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


# What a request counts beside its contents.
_HEADER_BYTES = 64


@dataclass(slots=True)
class _Pending:
    work: Work
    into: Sequence[Array] | None
    shipment: Shipment


class Calls:
    """Matches replies to requests, and ends those that get none.

    Args:
        transport: What the endpoint's messages travel by.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: dict[int, _Pending] = {}
        self._credits = Credits(config.credit_bytes)

    def begin(
        self, message: Message, address: str, into: Sequence[Array] | None, limit_s: float
    ) -> Work:
        """Local. Send a request, at once if credit allows.

        Args:
            message: The request; it gets its id here.
            address: Of the receiver, for messages.
            into: See :meth:`Endpoint.call`.
            limit_s: Seconds after which it fails.

        Returns:
            A Work that ends with the reply.
        """
        header, peer = message.header, message.peer
        header.id = next(_IDS)
        deadline = time.monotonic() + limit_s

        def drive(work: Work, until: float) -> None:
            error: Exception | None = None
            while error is None:
                now = time.monotonic()
                self.drive(work, min(until, deadline, now + _PEER_PERIOD_S))
                if work.is_completed():
                    return
                now = time.monotonic()
                loss = self._transport.loss(peer)
                if loss is not None:
                    error = UnavailableError(f"no reply to {header.method} from {address}: {loss}")
                elif now >= deadline:
                    error = DeadlineExceededError(
                        f"no reply to {header.method} from {address} within {limit_s:g} s; the "
                        "peer is busy, stuck or gone (MPIDIST_CALL_TIMEOUT_S sets the limit)"
                    )
                elif now >= until:
                    return
            self._give_up(header.id, error)

        def send() -> None:
            try:
                self._transport.send(message)
            except Exception as error:  # of whichever request has its turn: its own caller's
                self._give_up(header.id, error)

        work = Work(f"{header.method} to {address}", drive)
        size = _HEADER_BYTES + len(header.body) + sum(header.sizes)
        shipment = Shipment((peer, header.receiver), size, send)
        self._pending[header.id] = _Pending(work, into, shipment)
        self._credits.submit(shipment)
        return work

    def receive_into(self, header: Header) -> list[Array] | None:
        """Local. The caller's arrays for the buffers of a reply, if it gave some that fit."""
        entry = self._pending.get(header.id)
        if entry is None or entry.into is None:
            return None
        if [array.nbytes for array in entry.into] != list(header.sizes):
            return None
        return list(entry.into)

    def finish(self, message: Message) -> None:
        """Local. End the request that a reply answers."""
        header = message.header
        entry = self._pending.pop(header.id, None)
        if entry is None:
            logger.debug("reply %d to %s came after its deadline", header.id, header.method)
            return
        self._credits.release(entry.shipment)
        if header.HasField("failure"):
            entry.work.complete(error=from_code(header.failure.code, header.failure.message))
        else:
            entry.work.complete(Reply(header.body, message.buffers))

    def fail_all(self, error: Exception) -> None:
        """Local. End all that still wait with an error."""
        for identity in list(self._pending):
            self._give_up(identity, error)

    def _give_up(self, identity: int, error: Exception) -> None:
        entry = self._pending.pop(identity, None)
        if entry is not None:
            self._transport.forget(entry.shipment.peer[0], identity)
            self._credits.release(entry.shipment)
            entry.work.complete(error=error)

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
