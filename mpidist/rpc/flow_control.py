"""Flow control: an upper bound on the bytes of requests in flight to each peer.

It protects servers from floods. This module keeps the accounts; the client sends the requests.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

# Idle flows are kept up to this number, because most requests are the only one in flight.
_MAX_IDLE_FLOWS = 64


@dataclass(slots=True, eq=False)
class Flow:
    """The requests to one peer.

    Attributes:
        bytes_in_flight: Bytes of requests that were sent and have no reply yet.
        sending: True while a thread sends a request. Other requests wait, to keep their order.
        waiting: Requests that have not been sent.
    """

    bytes_in_flight: int = 0
    sending: bool = False
    waiting: deque[Any] = field(default_factory=deque)

    def is_idle(self) -> bool:
        """Return True if nothing is in flight and nothing waits."""
        return not (self.bytes_in_flight or self.sending or self.waiting)


class Outgoing:
    """Base class of requests under flow control.

    Attributes:
        nbytes: Size.
        flow: The flow of the request's peer; an empty one before the request is submitted.
        in_flight: True once the request may be sent.
        released: True once the request holds no credit. If the endpoint closes before ``submit``,
            the request is released first and never sent.
    """

    nbytes: int
    flow = Flow()
    in_flight = False
    released = False


R = TypeVar("R", bound=Outgoing)


class FlowControl(Generic[R]):
    """Admits the requests to each peer in order, as long as credit lasts.

    The calling thread sends each request that it gets here, resets ``flow.sending``, and asks for
    the next one. A request that is larger than the credit is sent when nothing else is in flight.

    Args:
        limit: Credit: bytes in flight to one peer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._flows: dict[Hashable, Flow] = {}
        self._lock = threading.Lock()

    def submit(self, request: R, peer: Hashable) -> R | None:
        """Queue a request. Return the request that the caller must send now."""
        with self._lock:
            flow = self._flows.get(peer) or self._open(peer)
            if request.released:
                return None
            request.flow = flow
            if not (flow.sending or flow.waiting) and self._reserve(flow, request):
                return request
            flow.waiting.append(request)
        return self.next(flow)  # the thread that was sending may have found nothing waiting

    def next(self, flow: Flow) -> R | None:
        """Return the next request that the caller must send; None if there is none."""
        with self._lock:
            while flow.waiting and not flow.sending:
                request: R = flow.waiting[0]
                if not request.released and not self._reserve(flow, request):
                    return None
                flow.waiting.popleft()
                if not request.released:
                    return request
        return None

    def release(self, request: R) -> R | None:
        """Return the credit of a request. Return the request that the caller must send now."""
        with self._lock:
            flow = request.flow
            if not request.released:
                request.released = True
                flow.bytes_in_flight -= request.nbytes if request.in_flight else 0
        return self.next(flow) if flow.waiting else None

    def _open(self, peer: Hashable) -> Flow:
        if len(self._flows) >= _MAX_IDLE_FLOWS:
            self._flows = {key: flow for key, flow in self._flows.items() if not flow.is_idle()}
        flow = self._flows[peer] = Flow()
        return flow

    def _reserve(self, flow: Flow, request: R) -> bool:
        """Take credit for a request. Return False if it must wait."""
        in_flight = flow.bytes_in_flight + request.nbytes
        if flow.bytes_in_flight and in_flight > self._limit:
            return False
        flow.bytes_in_flight = in_flight
        request.in_flight = flow.sending = True
        return True
