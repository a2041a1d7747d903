"""How much may be under way to a peer: a bound in bytes, so that no server is flooded. Pure."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Shipment(Protocol):
    """A request on its way.

    Attributes:
        peer: Where to, in the transport's own terms, and the endpoint there.
        nbytes: Its size.
        sent: Whether it has been; False at first.
        released: Whether it counts no more; False at first.
    """

    peer: tuple[Any, int]
    nbytes: int
    sent: bool
    released: bool

    def send(self) -> None:
        """Local. Send it; called once, or never if it is released before its turn."""


# Flows at rest are kept up to this number: mostly a request is the only one under way.
_MOST_AT_REST = 64


@dataclass(slots=True)
class _Flow:
    under_way: int = 0
    sending: bool = False
    waiting: deque[Shipment] = field(default_factory=deque)

    def at_rest(self) -> bool:
        return not (self.under_way or self.sending or self.waiting)


class Credits:
    """Lets requests to each peer leave in their order, as long as credit lasts.

    A request that is larger than all credit leaves when nothing else is under way.

    Args:
        limit: Bytes that may be under way to one peer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._flows: dict[Hashable, _Flow] = {}
        self._lock = threading.Lock()

    def submit(self, shipment: Shipment) -> None:
        """Local. Send a request now, or when earlier ones have been answered; never waits."""
        with self._lock:
            flow = self._flows.get(shipment.peer)
            if flow is None:
                flow = self._open(shipment.peer)
            leaves = not (flow.sending or flow.waiting) and self._depart(flow, shipment)
            if not leaves:
                flow.waiting.append(shipment)
        if leaves:
            self._send(flow, shipment)
        if flow.waiting:
            self._advance(flow)

    def release(self, shipment: Shipment) -> None:
        """Local. A request was answered, or is given up; a second call does nothing."""
        with self._lock:
            flow = self._flows.get(shipment.peer)
            if shipment.released or flow is None:
                return
            shipment.released = True
            if shipment.sent:
                flow.under_way -= shipment.nbytes
        if flow.waiting:
            self._advance(flow)

    def _open(self, peer: Hashable) -> _Flow:
        if len(self._flows) >= _MOST_AT_REST:
            self._flows = {key: flow for key, flow in self._flows.items() if not flow.at_rest()}
        flow = self._flows[peer] = _Flow()
        return flow

    def _send(self, flow: _Flow, shipment: Shipment) -> None:
        try:
            shipment.send()
        finally:
            flow.sending = False

    def _advance(self, flow: _Flow) -> None:
        """Send what may leave. One thread at a time does it for all, which keeps their order."""
        while (shipment := self._next(flow)) is not None:
            self._send(flow, shipment)

    def _next(self, flow: _Flow) -> Shipment | None:
        with self._lock:
            while not flow.sending and flow.waiting:
                shipment = flow.waiting[0]
                if not shipment.released:
                    if not self._depart(flow, shipment):
                        return None
                    flow.waiting.popleft()
                    return shipment
                flow.waiting.popleft()
        return None

    def _depart(self, flow: _Flow, shipment: Shipment) -> bool:
        """Take note that a request is about to be sent; False if it must wait."""
        under_way = flow.under_way + shipment.nbytes
        if flow.under_way and under_way > self._limit:
            return False
        flow.under_way = under_way
        shipment.sent = flow.sending = True
        return True
