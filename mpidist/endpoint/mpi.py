"""Messages between ranks, by MPI point-to-point operations on a communicator of their own.

A frame (header and small buffers) travels under tag 0, on one node into receives that are posted
beforehand; one that is too long for them is announced by a frame and follows under its own tag.
Buffers that are large, taken together, follow as messages of their own, so that they are received
straight into place; their tag comes from the request's id. Everything is nonblocking: sending never
waits for the receiver, and a large message that is still arriving holds up neither replies nor
other ranks. Requests and notices of one rank are delivered in the order in which they were sent.

Endpoint number n lives on rank n modulo the size of the world, so that number r is the first
endpoint of rank r. Requests for it are kept until it opens, and so are those for numbers from
:data:`AGREED_NUMBERS` on. A request for another number that is not open fails at once: such a
number is mostly a mistaken rank.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from mpidist.config import config
from mpidist.endpoint.address import Address, is_loopback
from mpidist.endpoint.doorbell import Doorbell
from mpidist.endpoint.frames import pack
from mpidist.endpoint.message import NO_ENDPOINT, REPLY, REQUEST, Array, Message
from mpidist.endpoint.mpi_arrivals import (
    ANNOUNCEMENT,
    ANNOUNCES,
    FRAME_TAG,
    LONG_FRAME_TAG,
    PIECE_BYTES,
    Arrivals,
    buffer_tag,
    pieces,
)
from mpidist.endpoint.mpi_inbox import LONGEST_BYTES, open_inbox
from mpidist.endpoint.shelf import Shelf
from mpidist.errors import CancelledError, DistNetworkError, UnavailableError
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.runtime import World, exits, fork, world

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.endpoint.endpoint import Endpoint

_LAST_REPLY_S = 1.0
# Some ten microseconds: what comes meanwhile is noticed sooner than by who goes all the way.
_TESTS = 100
# A frame ahead of buffers must not become visible after them, as one can that MPI does not send
# at once.
_LONGEST_AHEAD = 1024
# No cache holds more, so that a second copy, from the shelf into the caller's arrays, costs more
# than is gained: MPI copies once.
_LARGEST_PLACED = 8 << 20
_UNCLAIMED = 10_000  # messages that are kept for endpoints that are not open yet

AGREED_NUMBERS = 1 << 20
"""From here on endpoint numbers are not taken as they come: both sides know them beforehand, and
either may be first."""


class MpiTransport:
    """The endpoints of this rank, and the messages on their way; use :func:`mpi_transport`.

    Args:
        world: The MPI world.
    """

    protocol = "mpi"
    polled = True
    spins = 75  # about a millisecond: to be woken takes longer than a message

    def __init__(self, world: World) -> None:
        from mpi4py import MPI

        self._world = world
        self._comm = world.messages
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._testall = MPI.Request.Testall
        inbox = open_inbox(self._comm, FRAME_TAG, len(set(world.nodes)))
        mates = world.mates
        shelves = {rank: Shelf(memory) for rank, memory in mates.sections.items()}
        self._ring, self._flags, self._places = mates.ring, mates.flags, mates.places
        put = shelves[world.rank].put if shelves else None
        put_placed = put and partial(put, limit=_LARGEST_PLACED)
        self._puts = [put if rank in shelves else None for rank in range(world.size)]
        self._placed_puts = [put_placed if rank in shelves else None for rank in range(world.size)]
        self._arrivals = Arrivals(self._comm, inbox, self._into, shelves, config.credit_bytes)
        self._doorbell: Doorbell | None = None
        if len(shelves) == world.size:  # nobody else sends
            self._doorbell = Doorbell(self._lie_down, mates.get_up)
            self._doorbell.watch(mates.descriptor)
        self._endpoints: dict[int, Endpoint] = {}
        self._closed: set[int] = set()
        # For endpoints that are not open yet: tasks do not start at the same moment.
        self._unclaimed: list[Message] = []
        self._attaching = threading.Lock()
        self._receiving = threading.Lock()
        self._sending = threading.Lock()
        self._ordering = threading.Lock()
        self._outgoing: list[tuple[int, list[MPI.Request], Any]] = []
        self.linger = partial(self.progress, _TESTS)
        self._left = exits().left
        self._reported = 0
        self._over = False
        world.before_leave.append(self._close_all)
        world.at_leave.append(self._end)

    def attach(self, endpoint: Endpoint, number: int | None) -> int:
        """Local. See :class:`Transport`; a number of another rank, or in use, is an error."""
        fork.check_mpi()
        size, rank = self._world.size, self._world.rank
        with self._attaching:
            if number is None:
                number = next(
                    n for n in itertools.count(rank + size, size) if n not in self._endpoints
                )
            elif number % size != rank:
                raise DistNetworkError(
                    f"endpoint number {number} belongs to rank {number % size}, not {rank}: "
                    f"over mpi the numbers of this rank are {rank}, {rank + size}, "
                    f"{rank + 2 * size}, ...; None takes a free one"
                )
            elif number in self._endpoints:
                raise DistNetworkError(f"mpi://{self.host()}:{number} is in use already")
            self._closed.discard(number)
            # Before it is known and inside the lock: what arrives meanwhile was sent later.
            waiting, self._unclaimed = self._unclaimed, []
            for message in waiting:
                if message.receiver == number:
                    endpoint.deliver(message)
                else:
                    self._unclaimed.append(message)
            self._endpoints[number] = endpoint
        return number

    def listen(self, number: int) -> int:
        """Local. See :class:`Transport`."""
        return number

    def detach(self, number: int) -> None:
        """Local. See :class:`Transport`."""
        with self._attaching:
            if self._endpoints.pop(number, None) is not None:
                self._closed.add(number)

    def host(self) -> str:
        """Local. The name of this rank's host."""
        return self._world.host

    def resolve(self, address: Address) -> int:
        """Return the rank of an address; DistNetworkError if the host is not that rank's."""
        rank = address.port % self._world.size
        if address.host != self._world.hosts[rank] and not self._is_host_of(rank, address.host):
            raise DistNetworkError(
                f"{address} cannot be reached: endpoint {address.port} belongs to rank {rank} of "
                f"{self._world.size}, whose host is {self._world.hosts[rank]}; use the address "
                "that Endpoint.address gives there"
            )
        return rank

    def _is_host_of(self, rank: int, host: str) -> bool:
        """Return whether another name than the one that the rank's host gives itself means it."""
        own, named = self._world.hosts[rank].lower(), host.lower()
        if is_loopback(named):
            return self._world.nodes[rank] == self._world.nodes[self._world.rank]
        # One of them may be the fully qualified name.
        return own == named or own.startswith(f"{named}.") or named.startswith(f"{own}.")

    def send(self, message: Message) -> None:
        """Local. See :class:`Transport`."""
        fork.check_mpi()
        peer = message.peer
        placed = message.placed and message.kind == REPLY
        puts = self._placed_puts if placed else self._puts
        frame, views = pack(message, puts[peer])
        isend = self._comm.Isend
        with self._ordering:  # nothing may come between a frame and what follows it
            if self._over:
                raise CancelledError(f"this rank has left MPI: {message.method} is not sent")
            if len(frame) <= (_LONGEST_AHEAD if views else LONGEST_BYTES):
                first = isend(frame, peer, FRAME_TAG)
                requests = [first]
            else:
                first = isend(ANNOUNCEMENT.pack(ANNOUNCES, _length_of(frame)), peer, FRAME_TAG)
                requests = [first, isend(frame, peer, LONG_FRAME_TAG)]
            if views:
                tag = buffer_tag(message)
                requests += [isend(piece, peer, tag) for piece in pieces(views)]
            on_its_way = len(requests) > 1 or not first.Test()
        if on_its_way:
            with self._sending:
                self._outgoing.append((peer, requests, (frame, message.buffers)))
        if self._flags[self._places[peer]]:
            self._ring(peer)

    def forget(self, peer: int, identity: int) -> None:
        """Local. Nothing to do: nothing is sent twice."""

    def loss(self, peer: int) -> str | None:
        """Local. See :class:`Transport`; a reply sent before the end has time to arrive."""
        since = self._left.get(peer)
        if since is None or time.monotonic() - since <= _LAST_REPLY_S:
            return None
        return "the script there has ended"

    def process_of(self, peer: int) -> str:
        """Local. See :class:`Transport`."""
        return f"rank {peer}"

    def progress(self, tests: int = 1, *, patient: bool = False) -> bool:
        """Local. See :class:`Transport`; while another thread is at it, the patient wait."""
        if not self._receiving.acquire(patient):
            return False
        whole: list[Message] = []
        try:
            if self._over:
                return False
            happened = self._arrivals.poll(whole, tests)
            for message in whole:
                self._deliver(message)
            if len(self._left) != self._reported:
                self._report_losses()
        finally:
            self._receiving.release()
        if self._outgoing:
            self._send_on()
        if self._doorbell is not None and self._doorbell.waiting and whole:
            self._doorbell.ring()
        return happened

    def _send_on(self) -> None:
        """Have MPI send what it has kept back, and wake those whom that may concern."""
        with self._sending:
            if self._over:
                return
            peers = {peer for peer, _, _ in self._outgoing}
            self._outgoing = [item for item in self._outgoing if not self._testall(item[1])]
        for peer in peers:
            if self._flags[self._places[peer]]:
                self._ring(peer)

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Local. See :class:`Transport`; MPI itself has no way to sleep until a message arrives."""
        if self._doorbell is None or self._outgoing or not self._arrivals.is_idle():
            return False
        self._doorbell.wait(seconds, done)
        return True

    def _lie_down(self) -> bool:
        self._world.mates.lie_down()
        # Not past a thread that is at it: what it has not seen may have been sent before.
        return not self.progress(16, patient=True)

    def _report_losses(self) -> None:
        gone = list(self._left)[self._reported :]
        self._reported += len(gone)
        for rank in gone:
            for endpoint in list(self._endpoints.values()):
                endpoint.lose(self.process_of(rank))

    def _into(self, message: Message, sizes: Sequence[int]) -> Sequence[Array] | None:
        endpoint = self._endpoints.get(message.receiver)
        return None if endpoint is None else endpoint.receive_into(message, sizes)

    def _deliver(self, message: Message) -> None:
        endpoint = self._endpoints.get(message.receiver)
        if endpoint is not None:
            endpoint.deliver(message)
        elif message.kind != REPLY:
            self._deliver_later(message)

    def _deliver_later(self, message: Message) -> None:
        number = message.receiver
        with self._attaching:
            endpoint = self._endpoints.get(number)
            if endpoint is None and self._may_open(number):
                self._unclaimed.append(message)
                return
        if endpoint is not None:
            endpoint.deliver(message)
        elif message.kind == REQUEST:
            self._refuse(message)

    def _may_open(self, number: int) -> bool:
        """Return whether a message for an endpoint that is not open can be kept for it."""
        is_expected = self._is_expected(number) and number not in self._closed
        return is_expected and len(self._unclaimed) < _UNCLAIMED

    def _is_expected(self, number: int) -> bool:
        """Return whether an endpoint of this rank has its number before anything opens it."""
        size, rank = self._world.size, self._world.rank
        return number == rank or (number >= AGREED_NUMBERS and number % size == rank)

    def _refuse(self, message: Message) -> None:
        number, size = message.receiver, self._world.size
        failure = Failure(code=UnavailableError.code)
        what = f"mpi://{self.host()}:{number}"
        if number in self._closed:
            failure.message = f"{what} was closed before {message.method}"
        elif self._is_expected(number):
            failure.message = f"{what} is not there for {message.method}"
        else:
            failure.code = NO_ENDPOINT
            failure.message = (
                f"nothing serves {what}, which {message.method} was sent to: rank "
                f"{self._world.rank} has no endpoint {number} (the ranks are 0 to {size - 1}; "
                "Endpoint.address tells the addresses of further endpoints)"
            )
        self.send(Message(REPLY, message.id, message.sender, peer=message.peer, failure=failure))

    def _end(self) -> None:
        """Leave MPI, which ends now: threads that are late must not touch it any more."""
        with self._receiving, self._ordering, self._sending:
            self._over = True
            self._arrivals.drop_all()

    def _close_all(self) -> None:
        for endpoint in list(self._endpoints.values()):
            endpoint.close()


def _length_of(frame: bytes) -> int:
    if len(frame) > PIECE_BYTES:
        raise ValueError(
            f"a body of about {len(frame)} bytes is more than a message can have: send it as a "
            "buffer"
        )
    return len(frame)


@cache
def mpi_transport() -> MpiTransport:
    """Collective. The transport of this rank; the first call starts MPI."""
    return MpiTransport(world())
