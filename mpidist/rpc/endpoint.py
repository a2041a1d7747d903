"""Endpoints: request and reply with deadlines, over any transport.

``call`` sends a request and returns a Work. ``register`` adds a service. Handlers run one at a time
on the serving thread: the caller's thread under ``serve``, or a thread of its own under
``serve_in_thread``. A handler must not wait; it can reply later through its Request. Any thread
that waits for a reply also drives the transport, so that a pure client needs no thread of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any
from weakref import ref

from google.protobuf.message import DecodeError

from mpidist.config import config
from mpidist.errors import (
    CancelledError,
    DistNetworkError,
    InvalidArgumentError,
    OpError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
)
from mpidist.mpi import launched
from mpidist.mpi.backoff import Backoff
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.rpc.address import REMOTE_ALIASES, Address, transport_of
from mpidist.rpc.client import Client
from mpidist.rpc.codec import check_buffers, check_output_buffers
from mpidist.rpc.message import LATER, NOTICE, REPLY, REQUEST, Array, Message, Reply
from mpidist.rpc.transport import Transport
from mpidist.work import Timeout, Work, seconds

logger = logging.getLogger(__name__)

_EMPTY = Reply()

# The longest sleep between polls. Before its first sleep a server polls ``spin_count`` times, about
# a millisecond, because requests often follow each other.
_POLL_SLEEP_S = 1.5e-3
# The period of the calls of ``until`` in a loop that is woken by arrivals.
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
    _endpoint: Endpoint
    _message: Message

    @property
    def process(self) -> str:
        """Name of the sending process; see :meth:`Endpoint.on_peer_lost`."""
        return self._endpoint._process_of(self._message)

    def reply(self, body: bytes = b"", buffers: Sequence[Array] = ()) -> None:
        """Send the reply, from any thread. A second reply is logged as an error and not sent."""
        self._endpoint._reply(self._message, Reply(body, buffers), None)

    def fail(self, error: BaseException) -> None:
        """Reply with an error. An OpError arrives as the same class.

        After another reply the error is logged with its traceback and not sent.
        """
        self._endpoint._reply(self._message, _EMPTY, error)


Handler = Callable[[Request], Reply | None]


class _Deferred(ref[Request]):
    """Keeps the message of a deferred request, and notices when its handler drops the request."""

    __slots__ = ("message",)

    message: Message


class Endpoint:
    """Calls other endpoints and serves their calls.

    Args:
        transport: Carries its messages.
        number: Its number; None takes a free one.
    """

    def __init__(self, transport: Transport, number: int | None = None) -> None:
        if number is not None:
            number = index(number)
            if number < 0:
                raise ValueError(f"an endpoint's number cannot be {number}; None takes a free one")
        self._transport = transport
        self._client = Client(transport)
        self._closed = False
        self._address: Address | None = None
        self._handlers: dict[str, Handler] = {}
        # The inbox in order of arrival. A str is the name of a process that has disconnected. It
        # comes after the messages of the process. Over inproc the number may be used again: later
        # messages are from the new endpoint. A SimpleQueue cannot be used: under CPython 3.11 its
        # get() with a short timeout can block for ever.
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
        self._is_closing = False  # True if a handler has closed the endpoint
        self._draining = False
        self._number = transport.attach(self, number)
        # For error messages and logs. Reading ``address`` may open a port.
        self._name = f"{transport.protocol}://{transport.host()}:{self._number}"

    @property
    def address(self) -> Address:
        """The address at which other endpoints reach this one.

        Raises:
            CancelledError: Over tcp, the address was not read before :meth:`close`.
        """
        if self._address is None or not self._closed:
            port = self._transport.listen(self._number)
            self._address = Address(self._transport.protocol, self._transport.host(), port)
            self._name = str(self._address)
        return self._address

    # Calling

    def call(
        self,
        peer: Address | str,
        method: str,
        body: bytes = b"",
        buffers: Sequence[Array] = (),
        *,
        into: Sequence[Array] | None = None,
        timeout: Timeout = None,
        copy: bool = False,
    ) -> Work:
        """Call a method of another endpoint.

        Args:
            peer: Address of the endpoint.
            method: ``"service/Method"``.
            body: The method's own message, serialised; over mpi and tcp at most 1 GiB.
            buffers: C-contiguous arrays to send. Without ``copy`` they must stay unchanged until
                the Work ends. If the call fails without a reply (deadline, lost peer, closed
                endpoint), never change them afterwards: the transport may still read them.
            into: C-contiguous arrays that receive the reply's buffers, if the sizes match. If the
                call fails without a reply, never use them afterwards: a late reply may still be
                written to them.
            timeout: Seconds or a timedelta; by default ``MPIDIST_CALL_TIMEOUT_S``; inf for no
                limit. No timer runs: the call fails when a thread waits for it, or tests it, after
                the deadline. The handler at the receiver is not stopped.
            copy: Copy the buffers before the call returns, so that you may change them at once.
                Over mpi, buffers that fit into shared memory are copied only there.

        Returns:
            A Work with a :class:`Reply` as its result. It fails with the handler's error; with
            DeadlineExceededError; with UnavailableError if the receiver is closed, has discarded
            the request or is lost; or with CancelledError if this endpoint is closed.

        Raises:
            CancelledError: This endpoint is closed.
            DistNetworkError: The address cannot belong to an endpoint, or belongs to another
                transport. Over mpi the Work fails with it if the rank has no endpoint of that
                number.
            PermissionDeniedError: Over tcp, the address is on another host, and there is no secret.
            TypeError: A buffer is no NumPy array, or holds Python objects.
            ValueError: A buffer is not contiguous, an array of ``into`` is read-only, the body is
                larger than 1 GiB, or a text is no address.
        """
        limit = seconds(timeout)
        if limit is None:
            limit = config.call_timeout_s
        message = self._message(REQUEST, peer, method, body, buffers)
        message.copies_buffers = copy
        if into is not None:
            check_output_buffers(into)
            message.has_output_buffers = True
        return self._client.call(message, peer, into, limit)

    def notify(
        self, peer: Address | str, method: str, body: bytes = b"", buffers: Sequence[Array] = ()
    ) -> None:
        """Send a notice, which gets no reply.

        The arguments are those of :meth:`call`. Never change the buffers afterwards: the transport
        may read them at any later time.
        """
        self._transport.send(self._message(NOTICE, peer, method, body, buffers))

    def is_connected(self, peer: Address | str) -> bool:
        """Return whether a message to the peer can arrive now. Never blocks, opens no connection.

        Over tcp earlier messages must have opened a connection that works. Over mpi the script
        of the rank must not have ended. Over inproc there must be an endpoint at the address.

        Args:
            peer: The address of the peer.
        """
        if isinstance(peer, str):
            peer = Address.of(peer, self._transport.protocol)
        return self._transport.is_connected(peer)

    def work(self, name: str) -> Work:
        """Return a Work for the caller to complete, for instance in a callback of several calls.

        Waiting on the returned Work drives the transport, so callbacks run during the wait. Calls
        of this endpoint whose deadlines pass, or whose peers are lost, fail meanwhile.

        Args:
            name: Name for error messages.
        """
        return Work(name, self._client.wait_for_calls)

    def progress(self) -> bool:
        """Deliver the messages that have arrived, without blocking; True if anything happened."""
        return self._transport.progress()

    # Serving

    def register(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Serve ``service/<name>`` for every handler.

        Handlers run one at a time on the serving thread. A handler must not block: no other request
        is handled meanwhile. If the reply depends on another event, return ``LATER``.

        Args:
            service: Name of the service.
            handlers: By method name, functions of a :class:`Request`. A handler returns a
                :class:`Reply`, or None for an empty one, or ``LATER`` if it will call the
                request's ``reply`` later.

        Raises:
            CancelledError: This endpoint is closed.
            ValueError: The service exists.
        """
        self._check_open()
        if any(name.startswith(f"{service}/") for name in self._handlers):
            raise ValueError(f"service {service!r} exists already at {self._name}")
        self._handlers.update({f"{service}/{name}": call for name, call in handlers.items()})

    def unregister(self, service: str) -> None:
        """Remove a service. Later requests for it fail with UnimplementedError."""
        for method in [name for name in self._handlers if name.startswith(f"{service}/")]:
            self._handlers.pop(method, None)

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(process)`` when another process has disconnected.

        The callback runs on the serving thread, as handlers do. Its argument is the name that
        ``Request.process`` has. Over mpi every rank is reported when its script has ended; a rank
        that dies ends the whole job. Over tcp the processes that have connected to this endpoint
        are reported when they close their connections, or stay away for some seconds. Over inproc
        each endpoint counts as a process, and is reported when it is closed.
        """
        self._loss_callbacks.append(callback)

    def serve(self, until: Callable[[], bool], deadline: float = float("inf")) -> bool:
        """Handle requests on this thread; while another thread serves, only wait.

        Args:
            until: Called after the messages that have arrived are handled, and after each sleep.
                Serving ends when it returns True.
            deadline: On the clock of ``time.monotonic()``.

        Returns:
            True if ``until`` has returned True. False at the deadline, or if the endpoint was
            closed first.
        """
        while not self._serving.acquire(timeout=_UNTIL_PERIOD_S):
            if until():
                return True
            if self._closed or time.monotonic() >= deadline:
                return False
        self._serving_thread = threading.get_ident()
        try:
            backoff = Backoff(self._transport.spin_count, _POLL_SLEEP_S)
            sleeps, slept = 0, True  # sleeps since the last arrival
            while not self._closed:
                happened = bool(self._inbox) or self._transport.progress()
                # Other turns only poll, because their length adds to the latency of requests.
                if happened or slept or self._dropped:
                    self._handle_inbox()
                    if until():
                        return True
                if time.monotonic() >= deadline:
                    return False
                slept = False
                if happened:
                    backoff.reset()
                    sleeps = 0
                elif self._pause(
                    backoff, _UNTIL_PERIOD_S if sleeps < _SHORT_SLEEPS else _LONG_PERIOD_S
                ):
                    sleeps, slept = sleeps + 1, True
        finally:
            self._stop_serving()
        return until()

    def handle_arrived(self) -> None:
        """Handle the requests that have arrived, without polling the transport.

        Use it while another endpoint of the process polls, because a poll delivers the messages of
        all endpoints.
        """
        if self._has_news() and self._serving.acquire(blocking=False):
            self._serving_thread = threading.get_ident()
            try:
                self._handle_inbox()
            finally:
                self._stop_serving()

    def serve_in_thread(self) -> None:
        """Handle requests on a thread of their own until :meth:`close`; idempotent."""
        self._check_open()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self.serve,
                args=(lambda: False,),
                name=f"mpidist-endpoint-{self._number}",
                daemon=True,
            )
            self._thread.start()

    def drain(self, timeout: Timeout = None) -> bool:
        """Finish requests and calls in flight before :meth:`close`. Handlers must not call it.

        Every request that has arrived gets its reply, also from handlers that reply later, and
        every call of this endpoint ends. From this call on, new requests fail with
        UnavailableError, also after it has returned.

        Args:
            timeout: Seconds or a timedelta; by default ``MPIDIST_CALL_TIMEOUT_S``.

        Returns:
            False if the time was not enough.
        """
        limit = seconds(timeout)
        if limit is None:
            limit = config.call_timeout_s
        self._draining = True
        return self.serve(
            lambda: (
                not (self._inbox or self._deferred or self._dropped or self._busy)
                and self._client.is_idle()
            ),
            time.monotonic() + limit,
        )

    def close(self) -> None:
        """Stop serving and fail the pending calls; idempotent.

        Requests without replies fail with UnavailableError. If a handler calls this, the endpoint
        closes once the messages that have arrived are handled. The thread of
        :meth:`serve_in_thread` has ``MPIDIST_STALL_S`` seconds to return from its handler. Then an
        error that names the handler is logged, and the endpoint closes. A thread in :meth:`serve`
        is not awaited.
        """
        if self._closed:
            return
        self._closed = True
        if self._serving_thread == threading.get_ident():
            self._is_closing = True
            return
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
        self._end()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # The Receiver of its transport

    def deliver(self, message: Message) -> None:
        """Complete a call, or queue a message for the serving thread; see :class:`Receiver`."""
        if message.kind == REPLY:
            self._client.deliver(message)
            return
        if self._draining and message.kind == REQUEST:
            self._refuse(message, "is about to close")
            return
        self._inbox.append(message)
        if self._asleep:
            self._arrived.set()
        if self._closed:  # no thread will look at the inbox any more
            self._refuse_all()

    def output_buffers(self, message: Message, sizes: Sequence[int]) -> Sequence[Array] | None:
        """Return arrays for the buffers of a message; see :class:`Receiver`."""
        return self._client.output_buffers(message.id, sizes) if message.kind == REPLY else None

    def peer_lost(self, process: str) -> None:
        """Queue the loss of a process for the serving thread; see :class:`Receiver`."""
        self._inbox.append(process)
        self._arrived.set()

    # Inside

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError(f"the endpoint {self._name} is closed")

    def _check_protocol(self, peer: Address) -> None:
        transport = self._transport.protocol
        if peer.protocol in REMOTE_ALIASES and transport != "mpi" and not launched():
            return  # in a plain process these names mean inproc endpoints, too
        if transport_of(peer.protocol, launched=launched()) != transport:
            raise DistNetworkError(
                f"{peer} cannot be reached from {self._name}: open an endpoint over "
                f"{peer.protocol} for it"
            )

    def _message(
        self, kind: int, address: Address | str, method: str, body: bytes, buffers: Sequence[Array]
    ) -> Message:
        if self._closed:
            self._check_open()
        transport = self._transport
        if isinstance(address, str):
            address = Address.of(address, transport.protocol)
        elif not isinstance(address, Address):
            raise TypeError(f"a peer must be an address or its text, not {address!r}")
        if address.protocol != transport.protocol:
            self._check_protocol(address)
        if not isinstance(method, str) or not isinstance(body, bytes):
            raise TypeError(
                f"method and body must be str and bytes, not {type(method).__name__} and "
                f"{type(body).__name__}"
            )
        peer = transport.resolve(address)
        buffers = check_buffers(buffers)
        return Message(kind, 0, address.port, self._number, method, body, buffers, peer)

    def _process_of(self, message: Message) -> str:
        """Return the name of the process that sent a message."""
        return self._transport.process_of(message.peer)

    def _reply(self, message: Message, reply: Reply, error: BaseException | None) -> None:
        """Reply to a request, on any thread. A second reply is logged and not sent.

        Args:
            message: The request, or a notice. The error of a notice is only logged.
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
        try:
            if error is not None:
                answer.failure = _failure_of(error, message.method, self._name)
            self._transport.send(answer)
        except BaseException:  # the caller of this method can still reply with this error
            message.reply_started = False
            raise
        message.replied = True
        if self._deferred:
            self._deferred.pop(id(message), None)

    def _report_second(self, message: Message, error: BaseException | None) -> None:
        # After close() the caller has an UnavailableError. Only another error is news.
        if self._closed and isinstance(error, CancelledError | UnavailableError | None):
            return
        logger.error(
            "%s: a second reply to %s of %s is dropped, because a request has one reply: %s",
            self._name,
            message.method,
            self._process_of(message),
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
        self._refuse_dropped()

    def _refuse_dropped(self) -> None:
        while self._dropped:
            try:
                message = self._dropped.popleft()
            except IndexError:  # another thread has taken the last one
                return
            self._refuse(message, "has discarded the request without a reply")

    def _refuse(self, message: Message, reason: str) -> None:
        if not message.reply_started:
            text = f"{message.method}: the endpoint {self._name} {reason}"
            self._reply(message, _EMPTY, UnavailableError(text))

    def _defer(self, request: Request, message: Message) -> None:
        """Keep a request until its handler replies or drops it."""
        deferred = _Deferred(request, self._drop)
        deferred.message = message
        self._deferred[id(message)] = deferred
        if message.replied:  # by another thread, before the request was kept
            self._deferred.pop(id(message), None)
        if self._closed:  # close() may have missed it
            self._refuse(message, "was closed")

    def _drop(self, deferred: Any) -> None:
        """Queue a refusal of a request that its handler dropped without a reply.

        This runs in the destructor of the request, on any thread, so nothing can be sent here.
        """
        if id(deferred.message) in self._deferred:
            # Queued first, so that close() on another thread finds it at one of the two places.
            self._dropped.append(deferred.message)
            self._deferred.pop(id(deferred.message), None)
            self._arrived.set()

    def _stop_serving(self) -> None:
        self._busy = False
        self._serving_thread = 0
        self._serving.release()
        if self._is_closing:
            self._is_closing = False
            self._end()

    def _end(self) -> None:
        self._refuse_all()
        self._transport.detach(self._number)
        self._client.close(CancelledError(f"the endpoint {self._name} was closed"))

    def _handle_inbox(self) -> None:
        self._busy = True  # before the first message is taken, so that drain() misses none
        # Messages that arrive meanwhile wait, because serve() must check its limits between rounds.
        for _ in range(len(self._inbox)):
            arrived = self._next()
            if arrived is None:
                break
            if isinstance(arrived, str):
                self._running = None
                self._report_loss(arrived)
            else:
                self._handle(arrived)
        self._running = None
        self._busy = False
        self._refuse_dropped()

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
                self._reply(message, _EMPTY, self._unimplemented(method))
                return
            request = Request(method, message.body, message.buffers, self, message)
            self._running = message
            reply = handler(request)
            if reply is LATER:
                if message.kind == REQUEST:
                    self._defer(request, message)
            elif reply is None or isinstance(reply, Reply):
                self._reply(message, reply or _EMPTY, None)
            else:
                kind = type(reply).__name__
                text = f"{method} of {self._name} returned {kind}, not a Reply, None or LATER"
                self._reply(message, _EMPTY, UnknownError(text))
        except Exception as error:  # of the handler, or of a reply that cannot be sent
            self._reply(message, _EMPTY, error)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                raise
            # On another thread it would end that thread, and the service, without a word.
            self._reply(message, _EMPTY, SystemExit(error.code))

    def _unimplemented(self, method: str) -> UnimplementedError:
        known = ", ".join(sorted({name.partition("/")[0] for name in self._handlers})) or "none"
        return UnimplementedError(f"{self._name} does not serve {method!r}; its services: {known}")


def _failure_of(error: BaseException, method: str, address: str) -> Failure:
    """Return the failure that a caller receives for an error of a handler.

    An OpError keeps its class. A ValueError, a TypeError and a body that cannot be read become
    InvalidArgumentError. Every other error becomes UnknownError, and is logged with its traceback.
    """
    if isinstance(error, OpError):
        code = error.code
    elif isinstance(error, ValueError | TypeError | DecodeError):
        code = InvalidArgumentError.code
    else:
        code = UnknownError.code
        logger.error("%s: %s failed", address, method, exc_info=error)
    try:
        text = str(error)
    except Exception:
        text = "<its __str__ fails>"
    if not isinstance(error, OpError):
        text = f"{type(error).__name__}: {text} (in {method} at {address})"
    # UTF-8 cannot encode lone surrogates, which names of files can have (PEP 383).
    return Failure(code=code, message=text.encode(errors="backslashreplace").decode())
