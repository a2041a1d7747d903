"""Messages between ranks, by MPI point-to-point operations on a communicator of their own.

A frame (header and small buffers) travels under tag 0, into receives that are posted beforehand;
one that is too long for them is announced by a frame and follows under a tag of its own. Buffers
that are large, taken together, follow as messages of their own, so that they are received straight
into place; their tag comes from the request's id. Everything is nonblocking: sending never waits
for the receiver, and a large message that is still arriving holds up neither replies nor other
ranks. Requests and notices of one rank are delivered in the order in which they were sent.

Endpoint number n lives on rank n modulo the size of the world, so that number r is the first
endpoint of rank r.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from mpidist.config import config
from mpidist.endpoint.address import Address
from mpidist.endpoint.frames import BadFrameError, fill, pack, unpack
from mpidist.endpoint.message import REPLY, REQUEST, Array, Message, as_bytes
from mpidist.endpoint.mpi_inbox import LONGEST_BYTES, Inbox
from mpidist.endpoint.pool import Pool
from mpidist.errors import DistNetworkError, UnavailableError
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.runtime import World, exits, fork, world

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.endpoint.endpoint import Endpoint

logger = logging.getLogger(__name__)

_FRAME_TAG = 0
_BUFFER_TAGS = 16384
_LONG_FRAME_TAG = _BUFFER_TAGS + 1  # below every MPI's smallest upper bound for tags, 32767
_PIECE_BYTES = 1 << 30
_LAST_REPLY_S = 1.0

# Goes in place of a frame that is longer than an inbox takes, and has its length.
_ANNOUNCEMENT = struct.Struct("<8sQ")
_ANNOUNCES = b"mpidist>"


@dataclass(slots=True)
class _LongFrame:
    request: MPI.Request
    frame: bytearray
    behind: list[bytearray] = field(default_factory=list)  # later frames of the same rank


class MpiTransport:
    """The endpoints of this rank, and the messages on their way; use :func:`mpi_transport`.

    Args:
        world: The MPI world.
    """

    protocol = "mpi"
    polled = True

    def __init__(self, world: World) -> None:
        from mpi4py import MPI

        self._world = world
        self._comm = world.messages
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._any = (MPI.ANY_SOURCE, MPI.ANY_TAG)
        self._testall = MPI.Request.Testall
        self._inbox = Inbox(self._comm, _FRAME_TAG)
        self._pool = Pool(config.credit_bytes)
        self._endpoints: dict[int, Endpoint] = {}
        self._closed: set[int] = set()
        # For endpoints that are not open yet: tasks do not start at the same moment.
        self._unclaimed: dict[int, list[Message]] = {}
        self._attaching = threading.Lock()
        self._receiving = threading.Lock()
        self._sending = threading.Lock()
        self._ordering = threading.Lock()
        self._long: dict[int, _LongFrame] = {}
        self._arriving: list[tuple[list[MPI.Request], Message]] = []
        self._outgoing: list[tuple[list[MPI.Request], Any]] = []
        self._left = exits().left
        self._reported = 0
        world.before_leave.append(self._close_all)
        world.at_leave.append(self._drop_unread)

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
                    f"{rank + 2 * size}, ...; 0 takes a free one where a port is asked for"
                )
            elif number in self._endpoints:
                raise DistNetworkError(f"mpi://{self.host()}:{number} is in use already")
            self._closed.discard(number)
            # Before it is known and inside the lock: what arrives meanwhile was sent later.
            for message in self._unclaimed.pop(number, []):
                endpoint.deliver(message)
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
        """Local. The rank of an address."""
        return address.port % self._world.size

    def send(self, message: Message) -> None:
        """Local. See :class:`Transport`."""
        fork.check_mpi()
        frame, views = pack(message)
        peer = message.peer
        # In one go, because different requests may share a tag: the buffers of a rank's messages
        # must leave in the order of their frames.
        with self._ordering:
            if len(frame) <= LONGEST_BYTES:
                requests = [self._comm.Isend(frame, peer, _FRAME_TAG)]
            else:
                announcement = _ANNOUNCEMENT.pack(_ANNOUNCES, _length_of(frame))
                requests = [
                    self._comm.Isend(announcement, peer, _FRAME_TAG),
                    self._comm.Isend(frame, peer, _LONG_FRAME_TAG),
                ]
            if views:
                tag = _buffer_tag(message)
                requests += [self._comm.Isend(p, dest=peer, tag=tag) for p in _pieces(views)]
        if not self._testall(requests):
            with self._sending:
                self._outgoing.append((requests, (frame, message.buffers)))

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

    def progress(self) -> bool:
        """Local. See :class:`Transport`; gives False at once if another thread is at it."""
        if not self._receiving.acquire(blocking=False):
            return False
        try:
            arrived = self._inbox.take()
            happened = arrived is not None
            if arrived is not None:
                self._receive(*arrived)
            if self._long:
                happened |= self._finish_long_frames()
            if self._arriving:
                happened |= self._finish_arrivals()
            if len(self._left) != self._reported:
                self._report_losses()
        finally:
            self._receiving.release()
        if self._outgoing:
            with self._sending:
                self._outgoing = [item for item in self._outgoing if not self._testall(item[0])]
        return happened

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Local. Always False: MPI has no way to sleep until a message arrives."""
        return False

    def _report_losses(self) -> None:
        gone = list(self._left)[self._reported :]
        self._reported += len(gone)
        for rank in gone:
            for endpoint in list(self._endpoints.values()):
                endpoint.lose(self.process_of(rank))

    def _receive(self, source: int, frame: bytearray) -> None:
        if self._long and source in self._long:
            self._long[source].behind.append(frame)
            return
        try:
            if frame.startswith(_ANNOUNCES) and len(frame) == _ANNOUNCEMENT.size:
                self._begin_long_frame(source, _ANNOUNCEMENT.unpack(frame)[1])
                return
            message, sizes, follow = unpack(frame, source)
        except BadFrameError as error:
            logger.error("rank %d sent rank %d no message: %s", source, self._world.rank, error)  # noqa: TRY400
            return
        endpoint = self._endpoints.get(message.receiver)
        into = endpoint.receive_into(message, sizes) if endpoint is not None and sizes else None
        if follow:
            message.buffers = into or [self._pool.take(size) for size in sizes]
            views = [as_bytes(array) for array in message.buffers]
            tag = _buffer_tag(message)
            requests = [self._comm.Irecv(p, source=source, tag=tag) for p in _pieces(views)]
            self._arriving.append((requests, message))
            return
        if into is not None:
            message.buffers = fill(into, message.buffers)
        if self._arriving and message.kind != REPLY:
            self._arriving.append(([], message))  # an earlier one of its rank may not be here yet
        elif endpoint is not None:
            endpoint.deliver(message)
        else:
            self._deliver(message)

    def _begin_long_frame(self, source: int, nbytes: int) -> None:
        memory = bytearray(nbytes)
        request = self._comm.Irecv(memory, source, _LONG_FRAME_TAG)
        self._long[source] = _LongFrame(request, memory)

    def _finish_long_frames(self) -> bool:
        done = [source for source, long in self._long.items() if long.request.Test()]
        for source in done:
            long = self._long.pop(source)
            for frame in (long.frame, *long.behind):
                self._receive(source, frame)
        return bool(done)

    def _finish_arrivals(self) -> bool:
        arriving, self._arriving = self._arriving, []
        held = set()  # ranks whose later requests must wait
        for requests, message in arriving:
            ordered = message.kind != REPLY
            if not (ordered and message.peer in held) and self._testall(requests):
                self._deliver(message)
                continue
            self._arriving.append((requests, message))
            if ordered:
                held.add(message.peer)
        return len(self._arriving) < len(arriving)

    def _deliver(self, message: Message) -> None:
        number = message.receiver
        endpoint = self._endpoints.get(number)
        if endpoint is None:
            with self._attaching:
                endpoint = self._endpoints.get(number)
                if endpoint is None and number not in self._closed:
                    self._unclaimed.setdefault(number, []).append(message)
                    return
        if endpoint is not None:
            endpoint.deliver(message)
        elif message.kind == REQUEST:
            self._refuse(message)

    def _refuse(self, message: Message) -> None:
        failure = Failure(
            code=UnavailableError.code,
            message=f"mpi://{self.host()}:{message.receiver} was closed before {message.method}",
        )
        self.send(Message(REPLY, message.id, message.sender, peer=message.peer, failure=failure))

    def _close_all(self) -> None:
        for endpoint in list(self._endpoints.values()):
            endpoint.close()

    def _drop_unread(self) -> None:
        """Take what came too late for anybody: MPICH warns of messages left at the end."""
        self._inbox.close()
        status = self._inbox.status
        while (probed := self._comm.Improbe(*self._any, status)) is not None:
            probed.Recv(bytearray(status.count))


def _length_of(frame: bytes) -> int:
    if len(frame) > _PIECE_BYTES:
        raise ValueError(
            f"a body of about {len(frame)} bytes is more than a message can have: send it as a "
            "buffer"
        )
    return len(frame)


def _buffer_tag(message: Message) -> int:
    return 1 + (message.id + (message.kind == REPLY) * _BUFFER_TAGS // 2) % _BUFFER_TAGS


def _pieces(views: Sequence[Array]) -> list[Array]:
    """The buffers in pieces whose length fits MPI's 32-bit counts; empty ones are not sent."""
    return [
        view[start : start + _PIECE_BYTES]
        for view in views
        for start in range(0, view.nbytes, _PIECE_BYTES)
    ]


@cache
def mpi_transport() -> MpiTransport:
    """Collective. The transport of this rank; the first call starts MPI."""
    return MpiTransport(world())
