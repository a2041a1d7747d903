"""The client half of an endpoint: its calls, flow control, and the loop that waits for replies."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from mpidist.buffers.copying import copy_array
from mpidist.config import config
from mpidist.errors import (
    CancelledError,
    DeadlineExceededError,
    DistNetworkError,
    UnavailableError,
    from_code,
)
from mpidist.mpi import waiting_for
from mpidist.mpi.backoff import Backoff
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.rpc.codec import as_bytes
from mpidist.rpc.message import NO_ENDPOINT, Array, Message, Reply
from mpidist.rpc.transport import Transport
from mpidist.work import Work

logger = logging.getLogger(__name__)

# The longest sleep between polls. Replies mostly come soon, so it is shorter than a server's.
_POLL_SLEEP_S = 2e-4
# The longest sleep of a thread that is woken by arrivals. Other threads may complete the Work, too.
_WAIT_S = 0.01
# The period in which a waiting thread checks that the peer can still reply.
_PEER_CHECK_PERIOD_S = 0.5
# Flow control counts this for a header.
_HEADER_BYTES = 64
# Idle flows are removed once there are this many flows. Most flows are idle between two requests,
# and making one for every request takes time.
_MAX_IDLE_FLOWS = 64

# One sequence for all endpoints of the process. An endpoint number may be used again while replies
# to its previous owner are in flight, and these must not match a request of the new owner.
_ids = itertools.count(1)


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
    waiting: deque[Call] = field(default_factory=deque)

    def is_idle(self) -> bool:
        """Return True if nothing is in flight and nothing waits."""
        return not (self.bytes_in_flight or self.sending or self.waiting)


class Call(Work):
    """A request that waits for its reply.

    Args:
        client: The endpoint's client.
        message: The request; its id is drawn here.
        address: Address of the receiver, for error messages.
        into: Output buffers; see :meth:`Endpoint.call`.
        limit_s: Time limit in seconds.

    Attributes:
        address: Address of the receiver.
        nbytes: Size of the request.
        flow: The flow of the receiver; an empty flow before the request is submitted.
        in_flight: True once the request has credit, so that it may be sent.
        released: True once the call has ended. It then holds no credit, and is not sent if it was
            still queued.
    """

    flow = Flow()
    in_flight = False
    released = False

    def __init__(
        self,
        client: Client,
        message: Message,
        address: Any,
        into: Sequence[Array] | None,
        limit_s: float,
    ) -> None:
        super().__init__("", client.wait)
        message.id = next(_ids)
        self._client = client
        self.address = address
        self._limit_s = limit_s
        now = time.monotonic()
        self.deadline = now + limit_s
        self.report_at = now + config.stall_s
        self.message = message
        self.into = into
        self.nbytes = _HEADER_BYTES + len(message.body)
        for array in message.buffers:
            self.nbytes += array.nbytes

    @property
    def name(self) -> str:
        """The method and the receiver."""
        return f"{self.message.method} to {self.address}"

    def is_completed(self) -> bool:
        """Return True once the call has ended. After its deadline, this method ends the call."""
        if not self._done:
            now = time.monotonic()
            if now >= self.deadline:
                self._client.check(self, now)
        return self._done

    def failure(self, loss: str | None, now: float) -> Exception | None:
        """Return the error of a call that gets no reply; None if a reply can still come.

        Args:
            loss: Why the peer cannot reply, if it cannot.
            now: Time of ``time.monotonic()``.
        """
        text = f"no reply to {self.message.method} from {self.address}"
        if loss is not None:
            return UnavailableError(f"{text}: {loss}")
        if now >= self.deadline:
            return DeadlineExceededError(
                f"{text} within {self._limit_s:g} s; the peer is busy, stuck or gone "
                "(timeout= or MPIDIST_CALL_TIMEOUT_S sets the limit)"
            )
        return None


class FlowControl:
    """Bounds the bytes of requests in flight to each endpoint, to protect servers from floods.

    Requests are admitted in order while credit is left. The calling thread sends each request that
    these methods return, resets ``flow.sending``, and asks for the next request. A request that is
    larger than the credit is sent when no other request is in flight.

    Args:
        limit: The credit: upper limit of the bytes in flight to one peer.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._flows: dict[Hashable, Flow] = {}
        self._lock = threading.Lock()

    def submit(self, request: Call, peer: Hashable) -> Call | None:
        """Queue a request. Return the request that the caller must send now."""
        with self._lock:
            flow = self._flows.get(peer) or self._open(peer)
            if request.released:
                return None
            request.flow = flow
            if not (flow.sending or flow.waiting) and self._reserve(flow, request):
                return request
            request.message.own_buffers()
            flow.waiting.append(request)
        return self.next(flow)  # the thread that was sending may have found nothing waiting

    def next(self, flow: Flow) -> Call | None:
        """Return the next request that the caller must send; None if there is none."""
        with self._lock:
            while flow.waiting and not flow.sending:
                request: Call = flow.waiting[0]
                if not request.released and not self._reserve(flow, request):
                    return None
                flow.waiting.popleft()
                if not request.released:
                    return request
        return None

    def release(self, request: Call) -> Call | None:
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

    def _reserve(self, flow: Flow, request: Call) -> bool:
        """Take credit for a request. Return False if it must wait."""
        in_flight = flow.bytes_in_flight + request.nbytes
        if flow.bytes_in_flight and in_flight > self._limit:
            return False
        flow.bytes_in_flight = in_flight
        request.in_flight = flow.sending = True
        return True


class Client:
    """Matches replies to calls, and ends the calls that get no reply.

    Args:
        transport: Carries the endpoint's messages.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._pending: dict[int, Call] = {}
        self._flow_control = FlowControl(config.credit_bytes)
        self._closed: Exception | None = None  # the error of later calls

    def call(
        self, message: Message, address: Any, into: Sequence[Array] | None, limit_s: float
    ) -> Call:
        """Send a request, at once if credit allows. The arguments are those of :class:`Call`."""
        call = Call(self, message, address, into, limit_s)
        self._pending[message.id] = call
        if self._closed is not None:  # close() may have missed the call
            self._fail(call, self._closed)
        self._send(self._flow_control.submit(call, (message.peer, message.receiver)))
        return call

    def output_buffers(self, request_id: int, sizes: Sequence[int]) -> Sequence[Array] | None:
        """Return the caller's arrays for the buffers of a reply; None if they do not fit."""
        call = self._pending.get(request_id)
        into = None if call is None else call.into
        if into is None or [array.nbytes for array in into] != list(sizes):
            return None
        return into if all(array.flags.writeable for array in into) else None

    def deliver(self, message: Message) -> None:
        """Complete the call that a reply answers."""
        call = self._pending.pop(message.id, None)
        if call is None:
            logger.debug("reply %d came after its call had ended", message.id)
            return
        call.message.buffers = ()  # free the buffers even if the caller keeps the Work
        following = self._flow_control.release(call)
        if following is not None:
            self._send(following)
        if message.failure is not None:
            call.complete(error=_error_of(message.failure))
            return
        buffers, into = message.buffers, call.into
        if into is not None and into is not buffers:  # the transport may have received into them
            try:
                buffers = _copy_into(buffers, into)
            except BaseException as error:  # the caller's array has become read-only, or a signal
                call.complete(error=error)
                if not isinstance(error, Exception):
                    raise
                return
        call.complete(Reply(message.body, buffers))

    def is_idle(self) -> bool:
        """Return True if no call waits for its reply. Calls past their deadlines end here."""
        for call in list(self._pending.values()):
            call.is_completed()
        return not self._pending

    def close(self, error: Exception) -> None:
        """End all pending calls, and later ones, with an error."""
        self._closed = error
        for call in list(self._pending.values()):
            self._fail(call, error)

    def check(self, call: Call, now: float) -> None:
        """End a call whose peer is gone or whose deadline has passed."""
        error = call.failure(self._transport.loss(call.message.peer), now)
        if error is not None:
            self._fail(call, error)

    def wait(self, work: Any, deadline: float) -> None:
        """Wait for the reply to a call, as the ``drive`` of its Work.

        A wait of more than half a second is registered for ``mpidist doctor --hang``. Callers that
        know more than the method wait in shorter slices, and register the whole wait themselves.
        """
        call: Call = work
        began = time.monotonic()
        if self._wait_once(call, deadline, began):
            return
        with self._registered(f"the reply to {call.message.method}", [call], began):
            while not self._wait_once(call, deadline, time.monotonic()):
                pass

    def _wait_once(self, call: Call, deadline: float, now: float) -> bool:
        """Wait until the next check of the peer. Return True if the wait is over."""
        # Other calls fail at their deadline.
        if call.deadline == float("inf") and now >= call.report_at:
            call.report_at = float("inf")
            logger.warning(
                "waiting for %.3g s for the reply to %s; the peer is busy, stuck, or waits "
                "for others itself",
                config.stall_s,
                call.name,
            )
        self.run_until(call, min(deadline, call.deadline, now + _PEER_CHECK_PERIOD_S))
        if call.is_completed():
            return True
        now = time.monotonic()
        self.check(call, now)
        return now >= deadline or call.is_completed()

    def _registered(
        self, awaited: str, calls: Sequence[Call], began: float
    ) -> AbstractContextManager[None]:
        """Register a wait for replies; see :func:`mpidist.mpi.waiting_for`.

        Args:
            awaited: The wait, without the receivers of the calls.
            calls: The calls.
            began: Start of the wait, on the clock of ``time.monotonic()``.
        """
        since = time.time() - (time.monotonic() - began)
        transport = self._transport
        if transport.protocol == "mpi":
            tasks = [transport.process_of(call.message.peer) for call in calls]
        else:
            tasks = []
        peers = dict.fromkeys(tasks or [str(call.address) for call in calls])
        if peers:
            awaited += f" from {', '.join(peers)}"
        return waiting_for(awaited, dict.fromkeys(tasks), since)

    def wait_for_calls(self, work: Work, deadline: float) -> None:
        """Wait for a Work that callbacks of calls complete, as its ``drive``.

        Calls past their deadlines and calls to lost peers end here.
        """
        began = time.monotonic()
        if self._wait_for_calls_once(work, deadline, began):
            return
        with self._registered(f"the reply to calls of {work.name}", [], began):
            while not self._wait_for_calls_once(work, deadline, time.monotonic()):
                pass

    def _wait_for_calls_once(self, work: Work, deadline: float, now: float) -> bool:
        """Wait until the next check of all peers. Return True if the wait is over."""
        if work.is_completed():
            return True
        calls = list(self._pending.values())
        self.run_until(
            work,
            min([deadline, now + _PEER_CHECK_PERIOD_S, *[call.deadline for call in calls]]),
        )
        now = time.monotonic()
        for call in calls:
            self.check(call, now)
        return now >= deadline or work.is_completed()

    def run_until(self, work: Work, deadline: float) -> None:
        """Drive the transport until a Work completes or the deadline passes."""
        transport = self._transport
        if not transport.needs_polling:
            work.wait_for_event(deadline)
            return
        poll, spins = transport.progress, transport.spin_count
        backoff: Backoff | None = None
        while not work.is_completed():
            if poll():
                spins, backoff = transport.spin_count, None
                if time.monotonic() >= deadline:
                    return
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if spins > 0:
                spins -= 1
                os.sched_yield()
            elif not transport.wait(min(remaining, _WAIT_S), work.is_completed):
                backoff = backoff or Backoff(0, _POLL_SLEEP_S)
                backoff.pause()

    def _send(self, call: Call | None) -> None:
        """Send a call, and the calls that flow control admits after it."""
        while call is not None:
            flow = call.flow
            try:
                self._transport.send(call.message)
            except Exception as error:  # the error of this call, whichever thread sends it
                self._fail(call, error)
            except BaseException:  # an interrupt; the call must not keep its credit
                self._fail(call, CancelledError(f"{call.name} was interrupted"))
                raise
            finally:
                flow.sending = False
            if not flow.waiting:
                return
            call = self._flow_control.next(flow)

    def _fail(self, call: Call, error: Exception) -> None:
        """End a call with an error, unless its reply has arrived."""
        request_id = call.message.id
        if self._pending.pop(request_id, None) is not None:
            self._transport.forget(call.message.peer, request_id)
            call.message = replace(call.message, buffers=())  # another thread may be sending it
            following = self._flow_control.release(call)
            call.complete(error=error)
            self._send(following)


def _error_of(failure: Failure) -> Exception:
    if failure.code == NO_ENDPOINT:
        return DistNetworkError(failure.message)
    return from_code(failure.code, failure.message)


def _copy_into(buffers: Sequence[Array], into: Sequence[Array]) -> Sequence[Array]:
    """Copy buffers into the caller's arrays. Return these, or the buffers if the sizes differ."""
    if [array.nbytes for array in into] != [buffer.nbytes for buffer in buffers]:
        return buffers
    for array, buffer in zip(into, buffers, strict=True):
        copy_array(as_bytes(array), as_bytes(buffer))
    return into
