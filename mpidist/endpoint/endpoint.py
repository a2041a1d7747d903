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
from typing import Any

from mpidist.config import config
from mpidist.endpoint.address import Address, parse
from mpidist.endpoint.calls import SPINS, Calls
from mpidist.endpoint.message import Array, Message, Transport, as_bytes
from mpidist.endpoint.request import LATER, Handler, Reply, Request, failure_of
from mpidist.errors import (
    CancelledError,
    UnavailableError,
    UnimplementedError,
)
from mpidist.proto.mpidist_pb2 import Failure, Header
from mpidist.runtime.backoff import Backoff
from mpidist.work import Work

logger = logging.getLogger(__name__)


# A server that was busy a millisecond ago will be again: it goes on polling that long, and then
# sleeps at most half a millisecond. Whoever waits for a reply waits for little else.
_SERVER_SLEEPS_S = 5e-4

# How often a serving loop that is woken by its queue asks whether it should end.
_UNTIL_PERIOD_S = 0.01


class Endpoint:
    """A mailbox that calls others and serves calls.

    Args:
        transport: What carries its messages.
        number: Its number; None takes a free one.

    Attributes:
        address: Where others reach it.
    """

    def __init__(self, transport: Transport, number: int | None = None) -> None:
        self._transport = transport
        self._services: dict[str, Mapping[str, Handler]] = {}
        self._calls = Calls(transport)
        # Not a SimpleQueue: under CPython 3.11 its get() with a short timeout can block for ever,
        # when the timeout passes between its two looks at the clock.
        self._requests: deque[Message] = deque()
        self._arrived = threading.Event()
        self._thread: threading.Thread | None = None
        self._serving = threading.Lock()
        self._closed = False
        self._number = transport.attach(self, number)
        self.address = Address(transport.protocol, transport.host(), self._number)

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
        receiver = self._resolve(peer)
        identity, work = self._calls.begin(method, peer, receiver[0], into, limit)
        try:
            self._send(Header.REQUEST, identity, receiver, method, body, buffers)
        except BaseException:
            self._calls.forget(identity)
            raise
        return work

    def notify(
        self, peer: Address | str, method: str, body: bytes = b"", buffers: Sequence[Array] = ()
    ) -> None:
        """Local. Tell another endpoint something, without an answer; arguments as :meth:`call`."""
        self._check_open()
        self._send(Header.NOTICE, 0, self._resolve(peer), method, body, buffers)

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
            raise ValueError(f"service {service!r} exists already at {self.address}")
        self._services[service] = dict(handlers)

    def unregister(self, service: str) -> None:
        """Local. Serve it no more; later requests for it fail with UnimplementedError."""
        self._services.pop(service, None)

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
        self._transport.detach(self._number)
        self._arrived.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._refuse_waiting_requests()
        self._calls.fail_all(CancelledError(f"the endpoint {self.address} was closed"))

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # For transports and requests

    def deliver(self, message: Message) -> None:
        """Local. Take a message that has arrived; called by the transport, on any thread."""
        if message.header.kind != Header.REPLY:
            self._requests.append(message)
            self._arrived.set()
            return
        self._calls.finish(message)

    def receive_into(self, header: Header) -> list[Array] | None:
        """Local. The caller's arrays for the buffers of a reply, or None; for transports."""
        if header.kind != Header.REPLY:
            return None
        return self._calls.receive_into(header)

    def answer(self, message: Message, reply: Reply, error: BaseException | None) -> None:
        """Local. Answer a message; called by its :class:`Request`, on any thread.

        Args:
            message: What is answered; an error of a notice is only logged.
            reply: The result.
            error: What went wrong, in place of the result.
        """
        header = message.header
        if header.kind == Header.NOTICE:
            if error is not None:
                logger.error("%s: %s failed", self.address, header.method, exc_info=error)
            return
        failure = None if error is None else failure_of(error, header.method, self.address)
        self._send(
            Header.REPLY,
            header.id,
            (message.peer, header.sender),
            header.method,
            reply.body,
            reply.buffers,
            failure,
        )

    # Inside

    def _next_request(self) -> Message | None:
        try:
            return self._requests.popleft()
        except IndexError:  # none, or close() has taken it
            return None

    def _refuse_waiting_requests(self) -> None:
        while (message := self._next_request()) is not None:
            if message.header.kind == Header.REQUEST:
                closed = UnavailableError(f"the endpoint {self.address} was closed")
                self.answer(message, Reply(), closed)

    def _check_open(self) -> None:
        if self._closed:
            raise CancelledError(f"the endpoint {self.address} is closed")

    def _resolve(self, peer: Address | str) -> tuple[Any, int]:
        address = parse(peer, self._transport.protocol) if isinstance(peer, str) else peer
        return self._transport.resolve(address), address.port

    def _send(
        self,
        kind: Header.Kind,
        identity: int,
        receiver: tuple[Any, int],
        method: str,
        body: bytes,
        buffers: Sequence[Array],
        failure: Failure | None = None,
    ) -> None:
        peer, number = receiver
        header = Header(
            kind=kind,
            id=identity,
            receiver=number,
            sender=self._number,
            method=method,
            body=body,
            sizes=[as_bytes(array).nbytes for array in buffers],
            failure=failure,
        )
        self._transport.send(Message(header, buffers, peer))

    def _idle(self, backoff: Backoff) -> None:
        sleep_s = backoff.next_sleep() if self._transport.polled else _UNTIL_PERIOD_S
        if not sleep_s:
            os.sched_yield()
            return
        if self._arrived.wait(sleep_s):
            self._arrived.clear()  # before the requests are looked at, so that none is missed

    def _handle(self, message: Message) -> None:
        header = message.header
        service, _, name = header.method.partition("/")
        handler = self._services.get(service, {}).get(name)
        if handler is None:
            known = ", ".join(sorted(self._services)) or "none"
            self.answer(
                message,
                Reply(),
                UnimplementedError(
                    f"{self.address} does not serve {header.method!r}; its services: {known}"
                ),
            )
            return
        request = Request(header.method, header.body, message.buffers, self, message)
        try:
            reply = handler(request)
        except Exception as error:
            self.answer(message, Reply(), error)
            return
        if reply is not LATER:
            self.answer(message, reply or Reply(), None)
