"""The server half of an endpoint: its handlers, and the loop that runs them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

from mpidist.endpoint.message import NOTICE, REPLY, REQUEST, Message, Transport, check_buffers
from mpidist.endpoint.request import LATER, Handler, Reply, Request, failure_of
from mpidist.errors import CancelledError, UnavailableError, UnimplementedError, UnknownError
from mpidist.runtime.backoff import Backoff

logger = logging.getLogger(__name__)

_NOTHING = Reply()

# A server that was busy a millisecond ago will be again: it goes on polling that long. One that
# was idle for long may be late by a little more.
_SLEEPS_S = 1.5e-3

# How often a loop that is woken by what arrives asks whether it should end.
_UNTIL_PERIOD_S = 0.02
# After so many sleeps in which nothing came they are longer: to wake up takes a quarter of a
# millisecond of a core.
_SHORT_SLEEPS = 25
_LONG_S = 2 * _UNTIL_PERIOD_S


class _Deferred(ref[Message]):
    """Knows of a request that its handler keeps, and has not answered; does not keep it alive."""

    __slots__ = ("facts", "key", "peer", "placed")

    def __new__(cls, message: Message, dropped: Callable[[Any], None]) -> _Deferred:
        return super().__new__(cls, message, dropped)

    def __init__(self, message: Message, dropped: Callable[[Any], None]) -> None:
        self.key = id(message)
        self.facts = (message.kind, message.id, message.receiver, message.sender, message.method)
        self.peer, self.placed = message.peer, message.placed

    def answer_to(self) -> Message:
        """Local. What an answer has to know of the request."""
        return Message(*self.facts, peer=self.peer, placed=self.placed)


class Services:
    """Requests that wait for their handlers, and those that are not answered yet.

    Args:
        transport: What the endpoint's messages travel by.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._number = 0
        self._name = ""
        self._known: set[str] = set()
        self._handlers: dict[str, Handler] = {}
        # Not a SimpleQueue: under CPython 3.11 its get() with a short timeout can block for ever,
        # when the timeout passes between its two looks at the clock.
        # What has arrived, in order; a name is the loss of the process of that name, whose messages
        # come before it, and those of another one that takes the name behind it.
        self._requests: deque[Message | str] = deque()
        self._busy = False
        self._deferred: dict[int, _Deferred] = {}
        self._dropped: deque[Message] = deque()
        self._loss_callbacks: list[Callable[[str], None]] = []
        self._arrived = threading.Event()
        self._asleep = False
        self._thread: threading.Thread | None = None
        self._serving = threading.Lock()
        self._answering = threading.Lock()
        self._server = 0  # the thread that serves
        self._end: Callable[[], None] | None = None
        self._draining = False
        self._closed = False

    def identify(self, number: int, name: str) -> None:
        """Local. Say which endpoint this is: its number, and its name in messages."""
        self._number, self._name = number, name

    def register(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Local. See :meth:`Endpoint.register`."""
        if service in self._known:
            raise ValueError(f"service {service!r} exists already at {self._name}")
        self._known.add(service)
        self._handlers.update({f"{service}/{name}": call for name, call in handlers.items()})

    def unregister(self, service: str) -> None:
        """Local. See :meth:`Endpoint.unregister`."""
        self._known.discard(service)
        for method in [name for name in self._handlers if name.partition("/")[0] == service]:
            self._handlers.pop(method, None)

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Local. See :meth:`Endpoint.on_peer_lost`."""
        self._loss_callbacks.append(callback)

    def serve(self, until: Callable[[], bool], deadline: float) -> bool:
        """Local. See :meth:`Endpoint.serve`."""
        while not self._serving.acquire(timeout=_UNTIL_PERIOD_S):
            if until():
                return True
            if time.monotonic() >= deadline:
                return False
        self._server = threading.get_ident()
        try:
            backoff = Backoff(self._transport.spins, _SLEEPS_S)
            look = self._transport.linger
            sleeps = 0  # since something happened
            while not self._closed:
                happened = bool(self._requests) or look()
                look = self._transport.linger
                self._handle_arrived()
                if until():
                    return True
                if time.monotonic() >= deadline:
                    return False
                if happened:
                    backoff.reset()
                    sleeps = 0
                elif self._idle(backoff, _UNTIL_PERIOD_S if sleeps < _SHORT_SLEEPS else _LONG_S):
                    look = self._transport.progress  # what has come is there; as a rule nothing has
                    sleeps += 1
        finally:
            self._stop_serving()
        return until()

    def handle_arrived(self) -> None:
        """Local. See :meth:`Endpoint.handle_arrived`."""
        if self._has_news() and self._serving.acquire(blocking=False):
            self._server = threading.get_ident()
            try:
                self._handle_arrived()
            finally:
                self._stop_serving()

    def serve_in_thread(self) -> None:
        """Local. See :meth:`Endpoint.serve_in_thread`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self.serve,
                args=(lambda: False, float("inf")),
                name=f"mpidist-endpoint-{self._number}",
                daemon=True,
            )
            self._thread.start()

    def drain(self) -> None:
        """Local. Refuse requests that arrive from now on."""
        self._draining = True

    def is_drained(self) -> bool:
        """Local. Whether every request that has arrived is answered."""
        return not (self._requests or self._deferred or self._dropped or self._busy)

    def close(self, end: Callable[[], None]) -> None:
        """Local. Serve no more, and refuse what waits.

        Args:
            end: Called afterwards; if a handler closes the endpoint, when that has been answered.
        """
        if self._server == threading.get_ident():
            self._end = end
            self._closed = True
            return
        self._closed = True
        self._arrived.set()
        # What is collected may be closed on any thread, on the one that is about to serve as well.
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
        self._refuse_waiting()
        end()

    # For transports, through the endpoint, and for requests

    def take(self, message: Message) -> None:
        """Local. Take a request or a notice that has arrived; called on any thread."""
        if self._draining and message.kind == REQUEST:
            self._refuse(message, "is about to close")
            return
        self._requests.append(message)
        if self._asleep:
            self._arrived.set()
        if self._closed:  # nobody will look at it any more
            self._refuse_waiting()

    def lose(self, process: str) -> None:
        """Local. Take note that a process is gone; called on any thread."""
        self._requests.append(process)
        self._arrived.set()

    def process_of(self, message: Message) -> str:
        """Local. What the process that a request came from is called; for :class:`Request`."""
        return self._transport.process_of(message.peer)

    def answer(self, message: Message, reply: Reply, error: BaseException | None) -> None:
        """Answer a request; called by its :class:`Request`, on any thread.

        A second answer is logged and not sent: the caller takes the first one alone.

        Args:
            message: The request, or a notice, of which an error is only logged.
            reply: The result.
            error: The error of the handler, in place of the result.
        """
        if message.kind == NOTICE:
            if error is not None:
                logger.error("%s: %s failed", self._name, message.method, exc_info=error)
            return
        answer = Message(
            REPLY,
            message.id,
            message.sender,
            self._number,
            "",  # who asked knows
            reply.body,
            check_buffers(reply.buffers),
            message.peer,
            placed=message.placed,
        )
        with self._answering:
            is_second, message.answering = message.answering, True
        if is_second:
            self._report_second(message, error)
            return
        if error is not None:
            answer.failure = failure_of(error, message.method, self._name)
        try:
            self._transport.send(answer)
        except BaseException:  # a reply that cannot be sent: the error that says so can be
            message.answering = False
            raise
        message.answered = True
        if self._deferred:
            self._deferred.pop(id(message), None)

    # Inside

    def _report_second(self, message: Message, error: BaseException | None) -> None:
        # close() has told the caller that there will be no result; only another error is news.
        if self._closed and isinstance(error, CancelledError | UnavailableError | None):
            return
        logger.error(
            "%s: a second answer to %s of %s is dropped, for a request has one answer: %s",
            self._name,
            message.method,
            self.process_of(message),
            "an error" if error is not None else "a reply; return LATER after Request.reply()",
            exc_info=error,
        )

    def _report_loss(self, process: str) -> None:
        logger.info("%s: %s is gone", self._name, process)
        for callback in self._loss_callbacks:
            try:
                callback(process)
            except Exception:
                logger.exception(
                    "%s: what should follow the loss of %s failed", self._name, process
                )

    def _next(self) -> Message | str | None:
        try:
            return self._requests.popleft()
        except IndexError:  # none, or close() has taken it
            return None

    def _refuse_waiting(self) -> None:
        while (message := self._next()) is not None:
            if not isinstance(message, str) and message.kind == REQUEST:
                self._refuse(message, "was closed")
        for deferred in list(self._deferred.values()):
            message = deferred()
            if message is not None:
                self._refuse(message, "was closed")

    def _refuse(self, message: Message, why: str) -> None:
        error = UnavailableError(f"the endpoint {self._name} {why}")
        self.answer(message, Reply(), error)

    def _defer(self, message: Message) -> None:
        """Take note of a request that its handler answers later."""
        self._deferred[id(message)] = _Deferred(message, self._drop)
        if message.answered:  # by another thread, before this one could take note
            self._deferred.pop(id(message), None)

    def _drop(self, deferred: Any) -> None:
        """A request is gone and was not answered; nothing may be sent here, on whatever thread."""
        if self._deferred.pop(deferred.key, None) is not None:
            self._dropped.append(deferred.answer_to())
            self._arrived.set()

    def _stop_serving(self) -> None:
        self._busy = False
        self._server = 0
        self._serving.release()
        end, self._end = self._end, None
        if end is not None:  # a handler has closed the endpoint
            self._refuse_waiting()
            end()

    def _handle_arrived(self) -> None:
        self._busy = True  # before the first is taken: drain() must miss none
        while (arrived := self._next()) is not None:
            if isinstance(arrived, str):
                self._report_loss(arrived)
            else:
                self._handle(arrived)
        self._busy = False
        while self._dropped:
            self._refuse(self._dropped.popleft(), "dropped it unanswered")

    def _idle(self, backoff: Backoff, longest_s: float) -> bool:
        """Pause; whether that was a sleep."""
        sleep_s = backoff.next_sleep() if self._transport.polled else _UNTIL_PERIOD_S
        if not sleep_s:
            os.sched_yield()
            return False
        if self._transport.wait(longest_s, self._has_news):
            return True
        self._arrived.clear()
        self._asleep = True  # before the last look, so that none is missed
        if not self._has_news():
            self._arrived.wait(sleep_s)
        self._asleep = False
        return True

    def _has_news(self) -> bool:
        return bool(self._requests or self._dropped or self._closed)

    def _handle(self, message: Message) -> None:
        try:
            method = message.method
            handler = self._handlers.get(method)
            if handler is None:
                self.answer(message, _NOTHING, self._unknown(method))
                return
            request = Request(method, message.body, message.buffers, self, message)
            reply = handler(request)
            del request  # a handler that answers later keeps it
            if reply is LATER:
                if message.kind == REQUEST:
                    self._defer(message)
            elif reply is None or isinstance(reply, Reply):
                self.answer(message, reply or _NOTHING, None)
            else:
                kind = type(reply).__name__
                what = f"{method} of {self._name} returned {kind}, not a Reply, None or LATER"
                self.answer(message, _NOTHING, UnknownError(what))
        except Exception as error:  # of the handler, or of a reply that cannot be sent
            self.answer(message, _NOTHING, error)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                raise
            # It would end this thread, silently, and with it the service.
            self.answer(message, _NOTHING, SystemExit(error.code))

    def _unknown(self, method: str) -> UnimplementedError:
        known = ", ".join(sorted(self._known)) or "none"
        return UnimplementedError(f"{self._name} does not serve {method!r}; its services: {known}")
