"""Messages between ranks, by MPI point-to-point operations on a communicator of their own.

A frame (length of the header, header, small buffers) travels under tag 0. Buffers that are
large, taken together, follow as messages of their own, so that they are received straight into
place; their tag comes from the request's id. Everything is nonblocking: sending never waits for
the receiver, and a large message that is still arriving holds up neither replies nor other ranks.
Requests and notices of one rank are delivered in the order in which they were sent.

Endpoint number n lives on rank n modulo the size of the world, so that number r is the first
endpoint of rank r.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.endpoint.address import Address
from mpidist.endpoint.frames import BadFrameError, fill, pack, unpack
from mpidist.endpoint.message import Array, Message, as_bytes
from mpidist.errors import DistNetworkError, UnavailableError
from mpidist.proto.mpidist_pb2 import Failure, Header
from mpidist.runtime import World, exits, fork, world

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.endpoint.endpoint import Endpoint

logger = logging.getLogger(__name__)

_FRAME_TAG = 0
_BUFFER_TAGS = 16384  # below every MPI's smallest upper bound for tags, 32767
_PIECE_BYTES = 1 << 30
_LAST_REPLY_S = 1.0


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
        self._any_source = MPI.ANY_SOURCE
        self._testall = MPI.Request.Testall
        self._status = MPI.Status()
        self._endpoints: dict[int, Endpoint] = {}
        self._closed: set[int] = set()
        # For endpoints that are not open yet: tasks do not start at the same moment.
        self._unclaimed: dict[int, list[Message]] = {}
        self._attaching = threading.Lock()
        self._receiving = threading.Lock()
        self._sending = threading.Lock()
        self._ordering = threading.Lock()
        self._arriving: list[tuple[list[MPI.Request], Message]] = []
        self._outgoing: list[tuple[list[MPI.Request], Any]] = []
        self._left = exits().left
        self._reported = 0
        world.before_leave.append(self._close_all)

    def attach(self, endpoint: Endpoint, number: int | None) -> int:
        """Local. See :class:`Transport`; a number of another rank, or in use, is an error."""
        fork.check()
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
        fork.check()
        frame, views = pack(message)
        peer = message.peer
        # In one go, because different requests may share a tag: the buffers of a rank's messages
        # must leave in the order of their frames.
        with self._ordering:
            requests = [self._comm.Isend(frame, dest=peer, tag=_FRAME_TAG)]
            if views:
                tag = _buffer_tag(message.header)
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
            happened = self._receive_frame()
            if len(self._left) != self._reported:
                self._report_losses()
            if self._arriving:
                happened |= self._finish_arrivals()
        finally:
            self._receiving.release()
        if self._outgoing:
            with self._sending:
                self._outgoing = [item for item in self._outgoing if not self._testall(item[0])]
        return happened

    def _report_losses(self) -> None:
        gone = list(self._left)[self._reported :]
        self._reported += len(gone)
        for rank in gone:
            for endpoint in list(self._endpoints.values()):
                endpoint.lose(self.process_of(rank))

    def _receive_frame(self) -> bool:
        probed = self._comm.Improbe(source=self._any_source, tag=_FRAME_TAG, status=self._status)
        if probed is None:
            return False
        source = self._status.source
        frame = bytearray(self._status.count)
        probed.Recv(frame)
        try:
            header, inline = unpack(memoryview(frame))
        except BadFrameError as error:
            logger.error("rank %d sent rank %d no message: %s", source, self._world.rank, error)  # noqa: TRY400
            return True
        endpoint = self._endpoints.get(header.receiver)
        into = endpoint.receive_into(header) if endpoint is not None else None
        if inline is None:
            buffers = into or [np.empty(size, np.uint8) for size in header.sizes]
            views = [as_bytes(array) for array in buffers]
            tag = _buffer_tag(header)
            requests = [self._comm.Irecv(p, source=source, tag=tag) for p in _pieces(views)]
            self._arriving.append((requests, Message(header, buffers, source)))
            return True
        message = Message(header, fill(into, inline) if into else inline, source)
        if self._arriving and header.kind != Header.REPLY:
            self._arriving.append(([], message))  # an earlier one of its rank may not be here yet
        else:
            self._deliver(message)
        return True

    def _finish_arrivals(self) -> bool:
        arriving, self._arriving = self._arriving, []
        held = set()  # ranks whose later requests must wait
        for requests, message in arriving:
            ordered = message.header.kind != Header.REPLY
            if not (ordered and message.peer in held) and self._testall(requests):
                self._deliver(message)
                continue
            self._arriving.append((requests, message))
            if ordered:
                held.add(message.peer)
        return len(self._arriving) < len(arriving)

    def _deliver(self, message: Message) -> None:
        number = message.header.receiver
        endpoint = self._endpoints.get(number)
        if endpoint is None:
            with self._attaching:
                endpoint = self._endpoints.get(number)
                if endpoint is None and number not in self._closed:
                    self._unclaimed.setdefault(number, []).append(message)
                    return
        if endpoint is not None:
            endpoint.deliver(message)
        elif message.header.kind == Header.REQUEST:
            self._refuse(message)

    def _refuse(self, message: Message) -> None:
        header = message.header
        failure = Failure(
            code=UnavailableError.code,
            message=f"mpi://{self.host()}:{header.receiver} was closed before {header.method}",
        )
        reply = Header(kind=Header.REPLY, id=header.id, receiver=header.sender, failure=failure)
        self.send(Message(reply, (), message.peer))

    def _close_all(self) -> None:
        for endpoint in list(self._endpoints.values()):
            endpoint.close()


def _buffer_tag(header: Header) -> int:
    return 1 + (header.id + (header.kind == Header.REPLY) * _BUFFER_TAGS // 2) % _BUFFER_TAGS


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
