"""The requests of an endpoint that wait for their replies."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from mpidist.config import config
from mpidist.copying import copy_array
from mpidist.endpoint.credits import Credits
from mpidist.endpoint.message import NO_ENDPOINT, Array, Message, Transport, as_bytes
from mpidist.endpoint.request import Reply
from mpidist.errors import DeadlineExceededError, DistNetworkError, UnavailableError, from_code
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.runtime.backoff import Backoff
from mpidist.work import Work

logger = logging.getLogger(__name__)

# A reply is often not far: sleep less than a server does.
_SLEEPS_S = 2e-4

# How long somebody sleeps who is woken when something arrives; others may complete a work, too.
_WAIT_S = 0.01

# How often somebody who waits asks whether the peer is still there.
_PEER_PERIOD_S = 0.5

# One sequence for all endpoints of the process: a number may be taken again while replies to its
# last owner are still on their way, and they must match no request of the new one.
_IDS = itertools.count(1)


# What a request counts beside its contents.
_HEADER_BYTES = 64


class Call(Work):
    """A request from when it is made until its reply has come; a Work and a Shipment in one.

    Args:
        calls: Of the endpoint that asks.
        message: The request; it gets its id here.
        address: Of the receiver, for messages.
        into: See :meth:`Endpoint.call`.
        limit_s: Seconds after which it fails.
    """

    sent = False
    released = False

    def __init__(
        self,
        calls: Calls,
        message: Message,
        address: Any,
        into: Sequence[Array] | None,
        limit_s: float,
    ) -> None:
        super().__init__("", _drive)
        message.id = next(_IDS)
        self.calls = calls
        self._address = address
        self._limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.message = message
        self.into = into
        self.peer = (message.peer, message.receiver)
        self.nbytes = _HEADER_BYTES + len(message.body)
        for array in message.buffers:
            self.nbytes += array.nbytes

    @property
    def name(self) -> str:
        """The method and the receiver."""
        return f"{self.message.method} to {self._address}"

    def send(self) -> None:
        """Local. See :class:`Shipment`; what goes wrong is the caller's, whoever has its turn."""
        self.calls.send(self)

    def is_completed(self) -> bool:
        """Local. See :class:`Work`; it ends at its deadline, also if nobody waits for it."""
        if not self._done:
            now = time.monotonic()
            if now >= self.deadline and (error := self.failure(now)) is not None:
                self.calls.give_up(self, error)
        return self._done

    def failure(self, now: float) -> Exception | None:
        """Local. Why no reply will come; None as long as one can."""
        what = f"no reply to {self.message.method} from {self._address}"
        loss = self.calls.transport.loss(self.message.peer)
        if loss is not None:
            return UnavailableError(f"{what}: {loss}")
        if now >= self.deadline:
            return DeadlineExceededError(
                f"{what} within {self._limit_s:g} s; the peer is busy, stuck or gone "
                "(MPIDIST_CALL_TIMEOUT_S sets the limit)"
            )
        return None


def _drive(call: Any, deadline: float) -> None:
    """See :class:`Work`; asks now and then whether a reply can still come."""
    begun = time.monotonic()
    silent = call.deadline == float("inf")  # else an error will say it
    while True:
        now = time.monotonic()
        if silent and now - begun >= config.stall_s:
            silent = False
            logger.warning(
                "waiting for %.3g s for the reply to %s; the peer is busy, stuck, or waits for "
                "others itself", now - begun, call.name,
            )  # fmt: skip
        call.calls.drive(call, min(deadline, call.deadline, now + _PEER_PERIOD_S))
        if call.is_completed():
            return
        now = time.monotonic()
        error = call.failure(now)
        if error is not None:
            call.calls.give_up(call, error)
        if now >= deadline or call.is_completed():
            return


class Calls:
    """Matches replies to requests, and ends those that get none.

    Args:
        transport: What the endpoint's messages travel by.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._pending: dict[int, Call] = {}
        self._credits = Credits(config.credit_bytes)

    def begin(
        self, message: Message, address: Any, into: Sequence[Array] | None, limit_s: float
    ) -> Call:
        """Local. Send a request, at once if credit allows; see :class:`Call`."""
        call = Call(self, message, address, into, limit_s)
        self._pending[message.id] = call
        self._credits.submit(call)
        return call

    def send(self, call: Call) -> None:
        """Local. Send a request whose turn it is; an error ends it."""
        try:
            self.transport.send(call.message)
        except Exception as error:
            self.give_up(call, error)

    def receive_into(self, identity: int, sizes: Sequence[int]) -> Sequence[Array] | None:
        """Local. The caller's arrays for the buffers of a reply, if they can receive them."""
        call = self._pending.get(identity)
        into = None if call is None else call.into
        if into is None or [array.nbytes for array in into] != list(sizes):
            return None
        return into if all(array.flags.writeable for array in into) else None

    def finish(self, message: Message) -> None:
        """Local. End the request that a reply answers."""
        call = self._pending.pop(message.id, None)
        if call is None:
            logger.debug("reply %d came after its deadline", message.id)
            return
        self._credits.release(call)
        failure = message.failure
        if failure is None:
            buffers, into = message.buffers, call.into
            if into is not None and into is not buffers:  # a transport may have received into them
                try:
                    buffers = _placed(buffers, into)
                except Exception as error:  # the caller's array has changed: this is its error
                    call.complete(error=error)
                    return
                except BaseException as error:  # of a signal's handler
                    call.complete(error=error)
                    raise
            call.complete(Reply(message.body, buffers))
        else:
            call.complete(error=_error_of(failure))

    def are_over(self) -> bool:
        """Local. Whether no request waits for its reply; those past their deadlines end."""
        for call in list(self._pending.values()):
            call.is_completed()
        return not self._pending

    def fail_all(self, error: Exception) -> None:
        """Local. End all that still wait with an error."""
        for call in list(self._pending.values()):
            self.give_up(call, error)

    def give_up(self, call: Call, error: Exception) -> None:
        """Local. End a request with an error, unless its reply has come."""
        identity = call.message.id
        if self._pending.pop(identity, None) is not None:
            self.transport.forget(call.message.peer, identity)
            self._credits.release(call)
            call.complete(error=error)

    def drive(self, work: Work, deadline: float) -> None:
        """Local. Move the transport along until a work has ended, or the deadline passes."""
        if not self.transport.polled:
            work.wait_for_event(deadline)
            return
        linger, wait = self.transport.linger, self.transport.wait
        backoff = Backoff(self.transport.spins, _SLEEPS_S)
        while not work.is_completed():
            if linger():
                backoff.reset()
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            sleep_s = backoff.next_sleep()
            if not sleep_s:
                os.sched_yield()
            elif not wait(min(remaining, _WAIT_S), work.is_completed):
                time.sleep(sleep_s)


def _error_of(failure: Failure) -> Exception:
    if failure.code == NO_ENDPOINT:
        return DistNetworkError(failure.message)
    return from_code(failure.code, failure.message)


def _placed(buffers: Sequence[Array], into: Sequence[Array]) -> Sequence[Array]:
    """The caller's arrays, filled; the buffers themselves if the sizes differ."""
    if len(buffers) != len(into):
        return buffers
    for array, buffer in zip(into, buffers, strict=True):
        if array.nbytes != buffer.nbytes:
            return buffers
    for array, buffer in zip(into, buffers, strict=True):
        copy_array(as_bytes(array), as_bytes(buffer))
    return into
