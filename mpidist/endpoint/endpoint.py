"""Request and reply with deadlines, over any transport.

An endpoint is a mailbox with a number. ``call`` sends a request and gives a Work; ``register``
adds a service, whose handlers run one at a time on the serving thread: ``serve`` on the caller's
thread, or ``serve_in_thread``. A handler must not wait; it answers later through its Request.
Any thread that waits for a reply also moves the transport along, so that a pure client needs no
thread of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from operator import index

from mpidist.config import config
from mpidist.endpoint.address import REMOTE_ALIASES, Address, parse, transport_of
from mpidist.endpoint.calls import Calls
from mpidist.endpoint.message import (
    NOTICE,
    REPLY,
    REQUEST,
    Array,
    Message,
    Transport,
    check_buffers,
    check_into,
)
from mpidist.endpoint.request import Handler
from mpidist.endpoint.services import Services
from mpidist.errors import CancelledError, DistNetworkError
from mpidist.runtime import launched
from mpidist.work import Timeout, Work, seconds

logger = logging.getLogger(__name__)


class Endpoint:
    """A mailbox that calls others and serves calls.

    Args:
        transport: What carries its messages.
        number: Its number; None takes a free one.
    """

    def __init__(self, transport: Transport, number: int | None = None) -> None:
        if number is not None:
            number = index(number)
            if number < 0:
                raise ValueError(f"an endpoint's number cannot be {number}; None takes a free one")
        self._transport = transport
        self._calls = Calls(transport)
        self._services = Services(transport)
        self._closed = False
        self._address: Address | None = None
        self._number = transport.attach(self, number)
        # For messages. Only the address says where it can be reached, and asking for it may open
        # a port.
        self._name = f"{transport.protocol}://{transport.host()}:{self._number}"
        self._services.identify(self._number, self._name)

    @property
    def address(self) -> Address:
        """Where others reach it; over tcp, CancelledError if it was closed before anybody asked."""
        if self._address is None or not self._closed:
            port = self._transport.listen(self._number)
            self._address = Address(self._transport.protocol, self._transport.host(), port)
            self._name = str(self._address)
            self._services.identify(self._number, self._name)
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
    ) -> Work:
        """Local. Ask another endpoint.

        Args:
            peer: Its address.
            method: ``"service/Method"``.
            body: The method's own message, serialised.
            buffers: C-contiguous arrays to send; they must stay unchanged until the work ends.
            into: C-contiguous arrays that receive the reply's buffers, if the sizes match.
            timeout: Seconds or a timedelta; by default ``MPIDIST_CALL_TIMEOUT_S``.

        Returns:
            A Work whose result is a :class:`Reply`. It fails with what the handler raised, or with
            DeadlineExceededError, or UnavailableError once the receiver's script has ended.

        Raises:
            CancelledError: This endpoint is closed.
            DistNetworkError: There can be no endpoint at the address, or this one cannot reach it.
                Over mpi the Work fails with it if the rank has no endpoint of that number.
            TypeError: A buffer is no NumPy array, or holds Python objects.
            ValueError: A buffer is not contiguous, or one of ``into`` cannot be written.
        """
        self._check_open()
        limit = seconds(timeout)
        if limit is None:
            limit = config.call_timeout_s
        message = self._message(REQUEST, peer, method, body, buffers)
        if into is not None:
            check_into(into)
            message.placed = True
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

        Handlers run one at a time, on the serving thread, and must not wait.

        Args:
            service: Its name.
            handlers: By name, functions of a :class:`Request` that return a :class:`Reply`; None,
                for an empty one; or ``LATER``, and call the request's ``reply`` when they can.

        Raises:
            CancelledError: This endpoint is closed.
            ValueError: The service exists.
        """
        self._check_open()
        self._services.register(service, handlers)

    def unregister(self, service: str) -> None:
        """Local. Serve it no more; later requests for it fail with UnimplementedError."""
        self._services.unregister(service)

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Local. Have ``callback(process)`` called when a process that sent requests is gone.

        It runs on the serving thread, as handlers do, and gets the name that ``Request.process``
        has. Over mpi a script that has ended is gone; a rank that dies ends the whole job. Over tcp
        a process is gone when it says goodbye, or stays away for some seconds; over inproc, where
        each endpoint counts as one, when the endpoint is closed.
        """
        self._services.on_peer_lost(callback)

    def serve(self, until: Callable[[], bool], deadline: float = float("inf")) -> bool:
        """Local. Handle requests on this thread; while another thread does, only wait.

        Args:
            until: Asked after every round; serving ends when it gives True.
            deadline: On the clock of ``time.monotonic()``.

        Returns:
            True if ``until`` ended it, False at the deadline or when the endpoint was closed.
        """
        return self._services.serve(until, deadline)

    def handle_arrived(self) -> None:
        """Local. Handle the requests that are here, and look for no more; for who serves another.

        What arrives for any endpoint of a process is here once one of them has looked.
        """
        self._services.handle_arrived()

    def serve_in_thread(self) -> None:
        """Local. Handle requests on a thread of their own until :meth:`close`; idempotent."""
        self._check_open()
        self._services.serve_in_thread()

    def drain(self, timeout: Timeout = None) -> bool:
        """Local. Finish what is under way, before :meth:`close`; not to be called by a handler.

        Every request that has arrived is answered, also by handlers that do so later, and every
        call of this endpoint ends. Requests that arrive meanwhile fail with UnavailableError.

        Args:
            timeout: Seconds or a timedelta; by default ``MPIDIST_CALL_TIMEOUT_S``.

        Returns:
            False if the time was not enough.
        """
        limit = seconds(timeout)
        if limit is None:
            limit = config.call_timeout_s
        self._services.drain()
        return self._services.serve(
            lambda: self._services.is_drained() and self._calls.are_over(),
            time.monotonic() + limit,
        )

    def close(self) -> None:
        """Local. Stop serving and fail the calls that still wait; idempotent.

        Requests that were not answered fail with UnavailableError. Called by a handler, it takes
        effect once the handler's own reply has been sent.
        """
        if self._closed:
            return
        self._closed = True
        self._services.close(self._end)

    def _end(self) -> None:
        self._transport.detach(self._number)
        self._calls.fail_all(CancelledError(f"the endpoint {self._name} was closed"))

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # For transports

    def deliver(self, message: Message) -> None:
        """Local. Take a message that has arrived; called by the transport, on any thread."""
        if message.kind == REPLY:
            self._calls.finish(message)
        else:
            self._services.take(message)

    def receive_into(self, message: Message, sizes: Sequence[int]) -> Sequence[Array] | None:
        """Local. The caller's arrays for the buffers of a reply, or None; for transports."""
        if message.kind != REPLY:
            return None
        return self._calls.receive_into(message.id, sizes)

    def lose(self, process: str) -> None:
        """Local. Take note that a process is gone; called by the transport, on any thread."""
        self._services.lose(process)

    # Inside

    def _check_protocol(self, receiver: Address) -> None:
        named = receiver.protocol
        transport = self._transport.protocol
        if named in REMOTE_ALIASES and transport != "mpi" and not launched():
            return  # there they are names of what this process serves, too
        if transport_of(named, launched=launched()) != transport:
            raise DistNetworkError(
                f"{receiver} cannot be reached from {self._name}: open an endpoint over "
                f"{named} for it"
            )

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
        elif not isinstance(receiver, Address):
            raise TypeError(f"a peer must be an address or its text, not {receiver!r}")
        if receiver.protocol != transport.protocol:
            self._check_protocol(receiver)
        if not isinstance(method, str) or not isinstance(body, bytes):
            raise TypeError(
                f"method and body must be str and bytes, not {type(method).__name__} and "
                f"{type(body).__name__}"
            )
        peer = transport.resolve(receiver)
        buffers = check_buffers(buffers)
        return Message(kind, 0, receiver.port, self._number, method, body, buffers, peer)
