"""Request and reply with deadlines, over any transport.

An endpoint is a mailbox with a number. ``call`` sends a request and gives a Work; ``register``
adds a service, whose handlers run one at a time on the serving thread: ``serve`` on the caller's
thread, or ``serve_in_thread``. A handler must not wait; it answers later through its Request.
Any thread that waits for a reply also moves the transport along, so that a pure client needs no
thread of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from mpidist.config import config
from mpidist.endpoint.address import Address, parse
from mpidist.endpoint.calls import SPINS, Calls
from mpidist.endpoint.message import (
    NOTICE,
    REPLY,
    REQUEST,
    Array,
    Message,
    Transport,
    check_buffers,
)
from mpidist.endpoint.request import LATER, Handler, Reply, Request, failure_of
from mpidist.errors import (
    CancelledError,
    UnavailableError,
    UnimplementedError,
)
from mpidist.runtime.backoff import Backoff
from mpidist.work import Work

logger = logging.getLogger(__name__)


_NOTHING = Reply()

# A server that was busy a millisecond ago will be again: it goes on polling that long. One that
# was idle for long may be late by a little more.
_SERVER_SLEEPS_S = 1.5e-3

# How often a serving loop that is woken by its queue asks whether it should end.
_UNTIL_PERIOD_S = 0.01


class Endpoint:
    """A mailbox that calls others and serves calls.

    Args:
        transport: What carries its messages.
        number: Its number; None takes a free one.
    """

    def __init__(self, transport: Transport, number: int | None = None) -> None:
        self._transport = transport
        self._services: set[str] = set()
        self._handlers: dict[str, Handler] = {}
        self._calls = Calls(transport)
        # Not a SimpleQueue: under CPython 3.11 its get() with a short timeout can block for ever,
        # when the timeout passes between its two looks at the clock.
        self._requests: deque[Message] = deque()
        self._arrived = threading.Event()
        self._asleep = False
        self._thread: threading.Thread | None = None
        self._serving = threading.Lock()
        self._closed = False
        self._lost: deque[str] = deque()
        self._loss_callbacks: list[Callable[[str], None]] = []
        self._number = transport.attach(self, number)
        # For messages. Only the address says where it can be reached, and asking for it may open
        # a port.
        self._name = f"{transport.protocol}://{transport.host()}:{self._number}"

    @property
    def address(self) -> Address:
        """Where others reach it."""
        port = self._transport.listen(self._number)
        return Address(self._transport.protocol, self._transport.host(), port)

    # Calling

    def call(
        self,
        peer: Address | str,
        method: str,
        body: bytes = b"",
        buffers: Sequence[Array] = (),
        *,
        into: Sequence[Array] | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Local. Ask another endpoint.

        Args:
            peer: Its address.
            method: ``"service/Method"``.
            body: The method's own message, serialised.
            buffers: C-contiguous arrays to send; they must stay unchanged until the work ends.
            into: C-contiguous arrays that receive the reply's buffers, if the sizes match.
            timeout: Seconds; by default ``MPIDIST_CALL_TIMEOUT_S``.

        Returns:
            A Work whose result is a :class:`Reply`. It fails with what the handler raised, or with
            DeadlineExceededError, or UnavailableError once the receiver's script has ended.

        Raises:
            CancelledError: This endpoint is closed.
            DistNetworkError: There can be no endpoint at the address.
            ValueError: A buffer is not contiguous.
        """
        self._check_open()
        limit = config.call_timeout_s if timeout is None else timeout
        message = self._message(REQUEST, peer, method, body, buffers)
        return self._calls.begin(message, peer, into, limit)

    def notify(
        self, peer: Address | str, method: str, body: bytes = b"", buffers: Sequence[Array] = ()
    ) -> None:
        """Local. Tell another endpoint something, without an answer; arguments as :meth:`call`."""
        self._check_open()
        message = self._message(NOTICE, peer, method, body, buffers)
        self._transport.send(message)

    def work(self, name: str) -> Work:
        """Local. A Work that somebody completes, for instance a callback of one of several calls.

        Whoever waits for it moves the transport along, so that the callback can run.

        Args:
            name: What it is, for messages.
        """
        return Work(name, self._calls.drive)

    def progress(self) -> bool:
        """Local. Move the transport along, for those who wait for something else; never blocks."""
        return self._transport.progress()

    # Serving

    def register(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Local. Serve ``service/<name>`` for every handler.

        Raises:
            ValueError: The service exists.
        """
        if service in self._services:
            raise ValueError(f"service {service!r} exists already at {self._name}")
        self._services.add(service)
        self._handlers.update({f"{service}/{name}": call for name, call in handlers.items()})

    def unregister(self, service: str) -> None:
        """Local. Serve it no more; later requests for it fail with UnimplementedError."""
        self._services.discard(service)
        for method in [name for name in self._handlers if name.partition("/")[0] == service]:
            self._handlers.pop(method, None)

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Local. Have ``callback(process)`` called when a process that sent requests is gone.

        It runs on the serving thread, as handlers do, and gets the name that ``Request.process``
        has. Over mpi a script that has ended is gone; a rank that dies ends the whole job. Over tcp
        a process is gone when it says goodbye, or stays away for some seconds; over inproc, where
        each endpoint counts as one, when the endpoint is closed.
        """
        self._loss_callbacks.append(callback)

    def serve(self, until: Callable[[], bool], deadline: float = float("inf")) -> bool:
        """Local. Handle requests on this thread; while another thread does, only wait.

        Args:
            until: Asked after every round; serving ends when it gives True.
            deadline: On the clock of ``time.monotonic()``.

        Returns:
            True if ``until`` ended it, False at the deadline or when the endpoint was closed.
        """
        while not self._serving.acquire(timeout=_UNTIL_PERIOD_S):
            if until():
                return True
            if time.monotonic() >= deadline:
                return False
        try:
            backoff = Backoff(SPINS, _SERVER_SLEEPS_S)
            while not self._closed:
                if self._transport.progress() or self._requests:
                    backoff.reset()
                while (message := self._next_request()) is not None:
                    self._handle(message)
                while self._lost:
                    self._report_loss(self._lost.popleft())
                if until():
                    return True
                if time.monotonic() >= deadline:
                    return False
                self._idle(backoff)
        finally:
            self._serving.release()
        return until()

    def serve_in_thread(self) -> None:
        """Local. Handle requests on a thread of their own until :meth:`close`; idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self.serve,
                args=(lambda: False,),
                name=f"mpidist-endpoint-{self._number}",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """Local. Stop serving and fail the calls that still wait; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._refuse_waiting_requests()
        self._transport.detach(self._number)
        self._calls.fail_all(CancelledError(f"the endpoint {self._name} was closed"))

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # For transports and requests

    def deliver(self, message: Message) -> None:
        """Local. Take a message that has arrived; called by the transport, on any thread."""
        if message.kind != REPLY:
            self._requests.append(message)
            if self._asleep:
                self._arrived.set()
            if self._closed:  # nobody will look at it any more
                self._refuse_waiting_requests()
            return
        self._calls.finish(message)

    def receive_into(self, message: Message, sizes: Sequence[int]) -> Sequence[Array] | None:
        """Local. The caller's arrays for the buffers of a reply, or None; for transports."""
        if message.kind != REPLY:
            return None
        return self._calls.receive_into(message.id, sizes)

    def lose(self, process: str) -> None:
        """Local. Take note that a process is gone; called by the transport, on any thread."""
        self._lost.append(process)
        self._arrived.set()

    def process_of(self, message: Message) -> str:
        """Local. What the process that a request came from is called; for :class:`Request`."""
        return self._transport.process_of(message.peer)

    def answer(self, message: Message, reply: Reply, error: BaseException | None) -> None:
        """Local. Answer a message; called by its :class:`Request`, on any thread.

        Args:
            message: What is answered; an error of a notice is only logged.
            reply: The result.
            error: What went wrong, in place of the result.
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
        )
        if error is not None:
            answer.failure = failure_of(error, message.method, self._name)
        self._transport.send(answer)

    # Inside

    def _report_loss(self, process: str) -> None:
        logger.info("%s: %s is gone", self._name, process)
        for callback in self._loss_callbacks:
            try:
                callback(process)
            except Exception:
                logger.exception(
                    "%s: what should follow the loss of %s failed", self._name, process
                )

    def _next_request(self) -> Message | None:
        try:
            return self._requests.popleft()
        except IndexError:  # none, or close() has taken it
            return None

    def _refuse_waiting_requests(self) -> None:
        while (message := self._next_request()) is not None:
            if message.kind == REQUEST:
                closed = UnavailableError(f"the endpoint {self._name} was closed")
                self.answer(message, Reply(), closed)

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError(f"the endpoint {self._name} is closed")

    def _message(
        self,
        kind: int,
        receiver: Address | str,
        method: str,
        body: bytes,
        buffers: Sequence[Array],
    ) -> Message:
        transport = self._transport
        if isinstance(receiver, str):
            receiver = parse(receiver, transport.protocol)
        if not isinstance(method, str) or not isinstance(body, bytes):
            raise TypeError(
                f"method and body must be str and bytes, not {type(method).__name__} and "
                f"{type(body).__name__}"
            )
        peer = transport.resolve(receiver)
        buffers = check_buffers(buffers)
        return Message(kind, 0, receiver.port, self._number, method, body, buffers, peer)

    def _idle(self, backoff: Backoff) -> None:
        if self._transport.wait(_UNTIL_PERIOD_S, self._has_news):
            return
        sleep_s = backoff.next_sleep() if self._transport.polled else _UNTIL_PERIOD_S
        if not sleep_s:
            os.sched_yield()
            return
        self._arrived.clear()
        self._asleep = True  # before the last look, so that none is missed
        if not self._has_news():
            self._arrived.wait(sleep_s)
        self._asleep = False

    def _has_news(self) -> bool:
        return bool(self._requests or self._lost or self._closed)

    def _handle(self, message: Message) -> None:
        method = message.method
        handler = self._handlers.get(method)
        if handler is None:
            known = ", ".join(sorted(self._services)) or "none"
            self.answer(
                message,
                Reply(),
                UnimplementedError(
                    f"{self._name} does not serve {method!r}; its services: {known}"
                ),
            )
            return
        try:
            reply = handler(Request(method, message.body, message.buffers, self, message))
            if reply is not LATER:
                self.answer(message, reply or _NOTHING, None)
        except Exception as error:  # of the handler, or of a reply that cannot be sent
            self.answer(message, _NOTHING, error)
