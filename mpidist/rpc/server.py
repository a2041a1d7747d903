"""The server half of an endpoint: its handlers, and the loop that runs them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from google.protobuf.message import DecodeError

from mpidist.config import config
from mpidist.errors import (
    CancelledError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from mpidist.mpi.backoff import Backoff
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.rpc.codec import check_buffers
from mpidist.rpc.message import LATER, NOTICE, REPLY, REQUEST, Array, Message, Reply
from mpidist.rpc.transport import Transport

logger = logging.getLogger(__name__)

_EMPTY = Reply()

# The longest sleep between polls. A server that was busy a millisecond ago will be again, so it
# polls that long. A server that was idle for long may be late by a little more.
_POLL_SLEEP_S = 1.5e-3
# The period in which a loop that arrivals wake checks whether it should end.
_UNTIL_PERIOD_S = 0.02
# After this number of sleeps without arrivals the period doubles: a wake-up takes 0.25 ms of CPU.
_SHORT_SLEEPS = 25
_LONG_PERIOD_S = 2 * _UNTIL_PERIOD_S


@dataclass(slots=True, weakref_slot=True)
class Request:
    """A request or a notice, as its handler sees it.

    Attributes:
        method: ``"service/Method"``.
        body: The method's own message, serialised.
        buffers: Flat uint8 arrays; over inproc the sender's own arrays.
    """

    method: str
    body: bytes
    buffers: Sequence[Array]
    _server: RequestServer
    _message: Message

    @property
    def process(self) -> str:
        """Name of the sending process; see :meth:`Endpoint.on_peer_lost`."""
        return self._server.process_of(self._message)

    def reply(self, body: bytes = b"", buffers: Sequence[Array] = ()) -> None:
        """Send the reply, from any thread. A second reply is logged as an error and not sent."""
        self._server.reply(self._message, Reply(body, buffers), None)

    def fail(self, error: BaseException) -> None:
        """Reply with an error. An OpError arrives as the same class.

        After another reply the error is logged with its traceback and not sent.
        """
        self._server.reply(self._message, _EMPTY, error)


Handler = Callable[[Request], Reply | None]


class _Deferred(ref[Request]):
    """Keeps the message of a deferred request, and notices when its handler drops the request."""

    __slots__ = ("message",)

    message: Message


class RequestServer:
    """Queues requests, runs their handlers, and sees that each request gets one reply.

    Args:
        transport: Carries the endpoint's messages.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._number = 0
        self._name = ""
        self._services: set[str] = set()
        self._handlers: dict[str, Handler] = {}
        # The inbox in order of arrival. A str is the name of a process that has disconnected: the
        # entries before it come from that process, later ones from its successor. A SimpleQueue
        # does not serve: under CPython 3.11 its get() with a short timeout can block for ever.
        self._inbox: deque[Message | str] = deque()
        self._busy = False
        self._running: Message | None = None  # of the handler that runs now
        self._deferred: dict[int, _Deferred] = {}
        self._dropped: deque[Message] = deque()
        self._loss_callbacks: list[Callable[[str], None]] = []
        self._arrived = threading.Event()
        self._asleep = False
        self._thread: threading.Thread | None = None
        self._serving = threading.Lock()
        self._replying = threading.Lock()
        self._serving_thread = 0
        self._on_closed: Callable[[], None] | None = None
        self._draining = False
        self._closed = False

    def identify(self, number: int, name: str) -> None:
        """Set the number of the endpoint, and its name in messages."""
        self._number, self._name = number, name

    def register(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Add a service; see :meth:`Endpoint.register`."""
        if service in self._services:
            raise ValueError(f"service {service!r} exists already at {self._name}")
        self._services.add(service)
        self._handlers.update({f"{service}/{name}": call for name, call in handlers.items()})

    def unregister(self, service: str) -> None:
        """Remove a service."""
        self._services.discard(service)
        for method in [name for name in self._handlers if name.partition("/")[0] == service]:
            self._handlers.pop(method, None)

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Add a callback; see :meth:`Endpoint.on_peer_lost`."""
        self._loss_callbacks.append(callback)

    def serve(self, until: Callable[[], bool], deadline: float) -> bool:
        """Handle requests on this thread; see :meth:`Endpoint.serve`."""
        while not self._serving.acquire(timeout=_UNTIL_PERIOD_S):
            if until():
                return True
            if time.monotonic() >= deadline:
                return False
        self._serving_thread = threading.get_ident()
        try:
            backoff = Backoff(self._transport.spin_count, _POLL_SLEEP_S)
            poll = self._transport.poll_briefly
            sleeps = 0  # since the last arrival
            while not self._closed:
                happened = bool(self._inbox) or poll()
                poll = self._transport.poll_briefly
                self._handle_inbox()
                if until():
                    return True
                if time.monotonic() >= deadline:
                    return False
                if happened:
                    backoff.reset()
                    sleeps = 0
                elif self._pause(
                    backoff, _UNTIL_PERIOD_S if sleeps < _SHORT_SLEEPS else _LONG_PERIOD_S
                ):
                    # After a wake-up the message is there already, so one look suffices.
                    poll = self._transport.progress
                    sleeps += 1
        finally:
            self._stop_serving()
        return until()

    def handle_arrived(self) -> None:
        """Handle the requests in the inbox; see :meth:`Endpoint.handle_arrived`."""
        if self._has_news() and self._serving.acquire(blocking=False):
            self._serving_thread = threading.get_ident()
            try:
                self._handle_inbox()
            finally:
                self._stop_serving()

    def serve_in_thread(self) -> None:
        """Start the serving thread, unless it runs already."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self.serve,
                args=(lambda: False, float("inf")),
                name=f"mpidist-endpoint-{self._number}",
                daemon=True,
            )
            self._thread.start()

    def drain(self) -> None:
        """Refuse requests that arrive from now on."""
        self._draining = True

    def is_drained(self) -> bool:
        """Return True if every request that has arrived has its reply."""
        return not (self._inbox or self._deferred or self._dropped or self._busy)

    def close(self, on_closed: Callable[[], None]) -> None:
        """Stop serving and refuse the requests without replies.

        A handler that still runs after ``MPIDIST_STALL_S`` seconds is logged as an error, and its
        request is refused, too.

        Args:
            on_closed: Called at the end. If a handler closes the endpoint, that is after the
                handler's own reply.
        """
        if self._serving_thread == threading.get_ident():
            self._on_closed = on_closed
            self._closed = True
            return
        self._closed = True
        self._arrived.set()
        # A garbage collection may close an endpoint on any thread, even on its serving thread.
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(config.stall_s)
            running = self._running
            if self._thread.is_alive():
                logger.error(
                    "%s closes although the handler of %s has not returned for %g s; handlers "
                    "must not wait",
                    self._name,
                    "a lost process" if running is None else running.method,
                    config.stall_s,
                )
                if running is not None and running.kind == REQUEST:
                    self._refuse(running, "was closed")
        self._refuse_all()
        on_closed()

    # For the endpoint and for requests

    def deliver(self, message: Message) -> None:
        """Accept a request or a notice, on any thread."""
        if self._draining and message.kind == REQUEST:
            self._refuse(message, "is about to close")
            return
        self._inbox.append(message)
        if self._asleep:
            self._arrived.set()
        if self._closed:  # no thread will look at the inbox any more
            self._refuse_all()

    def peer_lost(self, process: str) -> None:
        """Accept the news that a process has disconnected, on any thread."""
        self._inbox.append(process)
        self._arrived.set()

    def process_of(self, message: Message) -> str:
        """Return the name of the process that sent a message."""
        return self._transport.process_of(message.peer)

    def reply(self, message: Message, reply: Reply, error: BaseException | None) -> None:
        """Reply to a request, on any thread. A second reply is logged and not sent.

        Args:
            message: The request, or a notice, whose error is only logged.
            reply: The result.
            error: The error of the handler, in place of the result.
        """
        if message.kind == NOTICE:
            if error is not None:
                logger.error("%s: %s failed", self._name, message.method, exc_info=error)
            return
        answer = Message(
            REPLY, message.id, message.sender, self._number, "", reply.body, reply.buffers,
            message.peer, has_output_buffers=message.has_output_buffers,
        )  # fmt: skip
        if reply.buffers:
            check_buffers(reply.buffers)
        with self._replying:
            is_second, message.reply_started = message.reply_started, True
        if is_second:
            self._report_second(message, error)
            return
        if error is not None:
            answer.failure = _failure_of(error, message.method, self._name)
        try:
            self._transport.send(answer)
        except BaseException:  # the caller of this method can still reply with this error
            message.reply_started = False
            raise
        message.replied = True
        if self._deferred:
            self._deferred.pop(id(message), None)

    # Inside

    def _report_second(self, message: Message, error: BaseException | None) -> None:
        # After close() the caller has an UnavailableError. Only another error is news.
        if self._closed and isinstance(error, CancelledError | UnavailableError | None):
            return
        logger.error(
            "%s: a second reply to %s of %s is dropped, because a request has one reply: %s",
            self._name,
            message.method,
            self.process_of(message),
            "an error" if error is not None else "a result; return LATER after Request.reply()",
            exc_info=error,
        )

    def _report_loss(self, process: str) -> None:
        logger.info("%s: %s is gone", self._name, process)
        for callback in self._loss_callbacks:
            try:
                callback(process)
            except Exception:
                logger.exception("%s: a callback for the loss of %s failed", self._name, process)

    def _next(self) -> Message | str | None:
        try:
            return self._inbox.popleft()
        except IndexError:  # it is empty, or close() has just emptied it
            return None

    def _refuse_all(self) -> None:
        while (message := self._next()) is not None:
            if not isinstance(message, str) and message.kind == REQUEST:
                self._refuse(message, "was closed")
        for deferred in list(self._deferred.values()):
            self._refuse(deferred.message, "was closed")

    def _refuse(self, message: Message, reason: str) -> None:
        if not message.reply_started:
            self.reply(message, _EMPTY, UnavailableError(f"the endpoint {self._name} {reason}"))

    def _defer(self, request: Request, message: Message) -> None:
        """Keep a request until its handler replies or drops it."""
        deferred = _Deferred(request, self._drop)
        deferred.message = message
        self._deferred[id(message)] = deferred
        if message.replied:  # by another thread, before the request was kept
            self._deferred.pop(id(message), None)

    def _drop(self, deferred: Any) -> None:
        """Queue a refusal of a request that its handler dropped without a reply.

        This runs in the destructor of the request, on any thread, so nothing can be sent here.
        """
        if self._deferred.pop(id(deferred.message), None) is not None:
            self._dropped.append(deferred.message)
            self._arrived.set()

    def _stop_serving(self) -> None:
        self._busy = False
        self._serving_thread = 0
        self._serving.release()
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:  # a handler has closed the endpoint
            self._refuse_all()
            on_closed()

    def _handle_inbox(self) -> None:
        self._busy = True  # before the first message is taken, so that drain() misses none
        while (arrived := self._next()) is not None:
            if isinstance(arrived, str):
                self._running = None
                self._report_loss(arrived)
            else:
                self._handle(arrived)
        self._running = None
        self._busy = False
        while self._dropped:
            self._refuse(self._dropped.popleft(), "dropped it unanswered")

    def _pause(self, backoff: Backoff, longest_s: float) -> bool:
        """Yield or sleep. Return True after a sleep."""
        sleep_s = backoff.next_sleep() if self._transport.needs_polling else _UNTIL_PERIOD_S
        if not sleep_s:
            os.sched_yield()
            return False
        if self._transport.wait(longest_s, self._has_news):
            return True
        self._arrived.clear()
        self._asleep = True  # before the last look at the inbox, so that no message is missed
        if not self._has_news():
            self._arrived.wait(sleep_s)
        self._asleep = False
        return True

    def _has_news(self) -> bool:
        return bool(self._inbox or self._dropped or self._closed)

    def _handle(self, message: Message) -> None:
        try:
            method = message.method
            handler = self._handlers.get(method)
            if handler is None:
                self.reply(message, _EMPTY, self._unimplemented(method))
                return
            request = Request(method, message.body, message.buffers, self, message)
            self._running = message
            reply = handler(request)
            if reply is LATER:
                if message.kind == REQUEST:
                    self._defer(request, message)
            elif reply is None or isinstance(reply, Reply):
                self.reply(message, reply or _EMPTY, None)
            else:
                kind = type(reply).__name__
                text = f"{method} of {self._name} returned {kind}, not a Reply, None or LATER"
                self.reply(message, _EMPTY, UnknownError(text))
        except Exception as error:  # of the handler, or of a reply that cannot be sent
            self.reply(message, _EMPTY, error)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                raise
            # On another thread it would end that thread, and the service, without a word.
            self.reply(message, _EMPTY, SystemExit(error.code))

    def _unimplemented(self, method: str) -> UnimplementedError:
        known = ", ".join(sorted(self._services)) or "none"
        return UnimplementedError(f"{self._name} does not serve {method!r}; its services: {known}")


def _failure_of(error: BaseException, method: str, address: str) -> Failure:
    """Return the failure that a caller receives for an error of a handler.

    An OpError keeps its class. A ValueError, a TypeError and a body that cannot be read become
    InvalidArgumentError. Every other error becomes UnknownError, and is logged with its traceback.
    """
    if isinstance(error, OpError):
        return Failure(code=error.code, message=error.message)
    if isinstance(error, ValueError | TypeError | DecodeError):
        code = InvalidArgumentError.code
    else:
        code = UnknownError.code
        logger.error("%s: %s failed", address, method, exc_info=error)
    return Failure(code=code, message=f"{type(error).__name__}: {error} (in {method} at {address})")
