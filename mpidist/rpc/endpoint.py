"""Endpoints: request and reply with deadlines, over any transport.

``call`` sends a request and returns a Work. ``register`` adds a service, whose handlers run one at
a time on the serving thread: the caller's thread under ``serve``, or a thread of its own under
``serve_in_thread``. A handler must not wait; it can reply later through its Request. Any thread
that waits for a reply also drives the transport, so that a pure client needs no thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from operator import index

from mpidist.config import config
from mpidist.errors import CancelledError, DistNetworkError
from mpidist.mpi import launched
from mpidist.rpc.address import REMOTE_ALIASES, Address, parse, transport_of
from mpidist.rpc.client import Client
from mpidist.rpc.codec import check_buffers, check_output_buffers
from mpidist.rpc.message import NOTICE, REPLY, REQUEST, Array, Message
from mpidist.rpc.server import Handler, RequestServer
from mpidist.rpc.transport import Transport
from mpidist.work import Timeout, Work, seconds


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
        self._server = RequestServer(transport)
        self._closed = False
        self._address: Address | None = None
        self._number = transport.attach(self, number)
        # For messages only: the real address can open a port when it is first read.
        self._name = f"{transport.protocol}://{transport.host()}:{self._number}"
        self._server.identify(self._number, self._name)

    @property
    def address(self) -> Address:
        """The address at which other endpoints reach this one.

        Over tcp it is an error (CancelledError) to ask for it first after :meth:`close`.
        """
        if self._address is None or not self._closed:
            port = self._transport.listen(self._number)
            self._address = Address(self._transport.protocol, self._transport.host(), port)
            self._name = str(self._address)
            self._server.identify(self._number, self._name)
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
        """Call a method of another endpoint.

        Args:
            peer: Address of the endpoint.
            method: ``"service/Method"``.
            body: The method's own message, serialised.
            buffers: C-contiguous arrays to send. They must stay unchanged until the Work ends.
            into: C-contiguous arrays that receive the reply's buffers, if the sizes match.
            timeout: Seconds or a timedelta; by default ``MPIDIST_CALL_TIMEOUT_S``.

        Returns:
            A Work whose result is a :class:`Reply`. It fails with the handler's error, with
            DeadlineExceededError, or with UnavailableError once the receiver's script has ended.

        Raises:
            CancelledError: This endpoint is closed.
            DistNetworkError: There can be no endpoint at the address, or this one cannot reach it.
                Over mpi the Work fails with it if the rank has no endpoint of that number.
            TypeError: A buffer is no NumPy array, or holds Python objects.
            ValueError: A buffer is not contiguous, or an array of ``into`` is read-only.
        """
        limit = seconds(timeout)
        if limit is None:
            limit = config.call_timeout_s
        message = self._message(REQUEST, peer, method, body, buffers)
        if into is not None:
            check_output_buffers(into)
            message.has_output_buffers = True
        return self._client.call(message, peer, into, limit)

    def notify(
        self, peer: Address | str, method: str, body: bytes = b"", buffers: Sequence[Array] = ()
    ) -> None:
        """Send a notice, which gets no reply. Arguments as of :meth:`call`."""
        self._transport.send(self._message(NOTICE, peer, method, body, buffers))

    def is_connected(self, peer: Address | str) -> bool:
        """Return whether a message to the peer can arrive now. Never blocks, opens no connection.

        Over tcp the connection that earlier messages opened must be in order. Over mpi the script
        of the rank must not have ended. Over inproc there must be an endpoint at the address.

        Args:
            peer: The address of the peer.
        """
        if isinstance(peer, str):
            peer = parse(peer, self._transport.protocol)
        return self._transport.is_connected(peer)

    def work(self, name: str) -> Work:
        """Return a Work for the caller to complete, for instance in a callback of several calls.

        Waiting on the returned Work drives the transport, so callbacks run during the wait.

        Args:
            name: Name for messages.
        """
        return Work(name, self._client.run_until)

    def progress(self) -> bool:
        """Deliver the messages that have arrived, without blocking; True if anything happened."""
        return self._transport.progress()

    # Serving

    def register(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Serve ``service/<name>`` for every handler.

        Handlers run one at a time, on the serving thread, and must not wait.

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
        self._server.register(service, handlers)

    def unregister(self, service: str) -> None:
        """Remove a service. Later requests for it fail with UnimplementedError."""
        self._server.unregister(service)

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(process)`` when a process that sent requests has disconnected.

        It runs on the serving thread, as handlers do. Its argument is the name that
        ``Request.process`` has. Over mpi a process is lost when its script has ended; a rank that
        dies ends the whole job. Over tcp a process is lost when it closes its connection, or stays
        away for some seconds. Over inproc each endpoint counts as a process, and is lost when it
        is closed.
        """
        self._server.on_peer_lost(callback)

    def serve(self, until: Callable[[], bool], deadline: float = float("inf")) -> bool:
        """Handle requests on this thread; while another thread serves, only wait.

        Args:
            until: Called after every round. Serving ends when it returns True.
            deadline: On the clock of ``time.monotonic()``.

        Returns:
            True if ``until`` ended it, False at the deadline or when the endpoint was closed.
        """
        return self._server.serve(until, deadline)

    def handle_arrived(self) -> None:
        """Handle the requests that are here, and poll for no more.

        Use it while another endpoint of the process polls, because a poll delivers the messages of
        all endpoints.
        """
        self._server.handle_arrived()

    def serve_in_thread(self) -> None:
        """Handle requests on a thread of their own until :meth:`close`; idempotent."""
        self._check_open()
        self._server.serve_in_thread()

    def drain(self, timeout: Timeout = None) -> bool:
        """Finish requests and calls in flight before :meth:`close`. Handlers must not call it.

        Every request that has arrived gets its reply, also from handlers that reply later, and
        every call of this endpoint ends. Requests that arrive meanwhile fail with
        UnavailableError.

        Args:
            timeout: Seconds or a timedelta; by default ``MPIDIST_CALL_TIMEOUT_S``.

        Returns:
            False if the time was not enough.
        """
        limit = seconds(timeout)
        if limit is None:
            limit = config.call_timeout_s
        self._server.drain()
        return self._server.serve(
            lambda: self._server.is_drained() and self._client.is_idle(),
            time.monotonic() + limit,
        )

    def close(self) -> None:
        """Stop serving and fail the pending calls; idempotent.

        Requests without replies fail with UnavailableError. If a handler calls this, it takes
        effect after the handler's own reply. If a handler of the serving thread does not return
        within ``MPIDIST_STALL_S`` seconds, an error that names it is logged, and the endpoint
        closes without it.
        """
        if self._closed:
            return
        self._closed = True
        self._server.close(self._on_closed)

    def _on_closed(self) -> None:
        self._transport.detach(self._number)
        self._client.close(CancelledError(f"the endpoint {self._name} was closed"))

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # The Receiver of its transport

    def deliver(self, message: Message) -> None:
        """Accept a message; see :class:`Receiver`."""
        if message.kind == REPLY:
            self._client.deliver(message)
        else:
            self._server.deliver(message)

    def output_buffers(self, message: Message, sizes: Sequence[int]) -> Sequence[Array] | None:
        """Return arrays for the buffers of a message; see :class:`Receiver`."""
        return self._client.output_buffers(message.id, sizes) if message.kind == REPLY else None

    def peer_lost(self, process: str) -> None:
        """Accept the loss of a process; see :class:`Receiver`."""
        self._server.peer_lost(process)

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
            address = parse(address, transport.protocol)
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
