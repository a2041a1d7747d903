"""The transport between ranks: MPI point-to-point messages on a communicator of their own.

A frame holds the header and small buffers. Large buffers go through shared memory within a node. If
there is no room, or between nodes, they follow the frame as messages of their own, which are
received into new arrays or the caller's. A sender never waits for the receiver. Requests and
notices of one rank are delivered in the order of sending, so a large buffer in transfer delays the
later ones of its rank, and no other message. A large body delays all messages, because its frame is
received alone.

All messages are received by matched probes for any source and tag, which find the messages of a
rank in the order of sending (MPI 4.1, 3.5). So a buffer that no frame has announced, or a frame in
place of a buffer, comes from corrupt bytes. These are dropped, and reported once for each rank.
Memory for announced buffers is allocated when the first one arrives and has the right size.
Unannounced buffers are received into temporary memory and dropped.

Endpoint number n belongs to rank n modulo the size of the world, so that number r is the first
endpoint of rank r. Requests and notices for number r, and for numbers from :data:`AGREED_NUMBERS`
on, are kept until the endpoint opens, unless it has been closed before. A request for another
number that is not open fails at once, because such a number is mostly a mistaken rank.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from mpidist.errors import CancelledError, DistNetworkError, UnavailableError
from mpidist.mpi import World, fork, world
from mpidist.proto.mpidist_pb2 import Failure
from mpidist.rpc.address import Address, is_loopback
from mpidist.rpc.codec import BadFrameError, as_bytes, decode, encode
from mpidist.rpc.message import NO_ENDPOINT, REPLY, REQUEST, Array, Message
from mpidist.rpc.shared_buffers import SharedBuffer
from mpidist.rpc.transport import Receiver
from mpidist.rpc.waker import Waker

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

FRAME_TAG, BUFFER_TAG = 0, 1
_CHUNK_BYTES = 1 << 30  # MPI counts have 32 bits
_LAST_REPLY_S = 1.0  # time for the last messages of a rank after the end of its script
# About 10 us of probing, which notices a message sooner than full rounds of progress().
_PROBES = 100
_LAST_PROBES = 16  # before a rank sleeps
# Replies into the caller's arrays need a second copy, out of shared memory. Above this size the two
# copies take longer than MPI's single one (docs/explanation/decisions.md has the times).
_MAX_SHARED_REPLY_BYTES = 8 << 20
_MAX_UNCLAIMED = 10_000  # messages that are kept for endpoints that are not open yet
_MAX_WAKE_UPS = 64  # datagrams read at once, so that a flood of them keeps no rank busy

AGREED_NUMBERS = 1 << 20
"""Endpoint numbers from here on are agreed in advance, and either side may come first."""


class MpiTransport:
    """The endpoints of this rank and the messages in transfer. Use :func:`mpi_transport`.

    Args:
        world: The MPI world.
    """

    protocol = "mpi"
    needs_polling = True
    spin_count = 75  # about a millisecond, because a wake-up takes longer than a message

    def __init__(self, world: World) -> None:
        from mpi4py import MPI

        self._world = world
        self._comm = world.messages
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._testall = MPI.Request.Testall
        peers = world.peers
        shared = {rank: SharedBuffer(memory) for rank, memory in peers.sections.items()}
        self._flags, self._flag_offsets = peers.flags, peers.flag_offsets
        write = shared[world.rank].write if shared else None
        write_reply = write and partial(write, limit=_MAX_SHARED_REPLY_BYTES)
        self._writers = [write if rank in shared else None for rank in range(world.size)]
        self._reply_writers = [
            write_reply if rank in shared else None for rank in range(world.size)
        ]
        self._probes = _PROBES  # of the next progress()
        self._inbox = _Inbox(self._comm, self._output_buffers, shared)
        self._completed: deque[Message] = deque()  # messages to deliver
        self._waker: Waker | None = None
        if len(shared) == world.size:  # ranks of other nodes could not wake this one
            self._waker = Waker(self._set_idle, self._clear_idle)
            self._waker.watch(peers.socket.fileno())
        self._receivers: dict[int, Receiver] = {}
        self._closed: set[int] = set()
        # Messages for endpoints that are not open yet, because tasks start at different times.
        self._unclaimed: list[Message] = []
        self._attach_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._outgoing: list[tuple[int, list[MPI.Request]]] = []  # requests keep their buffers
        self._left = world.shutdown.left
        self._reported_losses = 0
        self._ended = False
        world.shutdown.before_leave.append(self._close_all)
        world.shutdown.at_leave.append(self._end)

    def attach(self, receiver: Receiver, number: int | None) -> int:
        """See :class:`Transport`; a number of another rank, or in use, is an error."""
        fork.check_mpi()
        size, rank = self._world.size, self._world.rank
        with self._attach_lock:
            if number is None:
                number = next(
                    n for n in itertools.count(rank + size, size) if n not in self._receivers
                )
            elif number % size != rank:
                raise DistNetworkError(
                    f"endpoint number {number} belongs to rank {number % size}, not {rank}: "
                    f"over mpi the numbers of this rank are {rank}, {rank + size}, "
                    f"{rank + 2 * size}, ...; None takes a free one"
                )
            elif number in self._receivers:
                raise DistNetworkError(f"mpi://{self.host()}:{number} is in use already")
            self._closed.discard(number)
            # Before the endpoint is registered: messages that arrive meanwhile were sent later.
            waiting, self._unclaimed = self._unclaimed, []
            for message in waiting:
                if message.receiver == number:
                    receiver.deliver(message)
                else:
                    self._unclaimed.append(message)
            self._receivers[number] = receiver
        return number

    def listen(self, number: int) -> int:
        """See :class:`Transport`."""
        return number

    def detach(self, number: int) -> None:
        """See :class:`Transport`."""
        with self._attach_lock:
            if self._receivers.pop(number, None) is not None:
                self._closed.add(number)

    def host(self) -> str:
        """Return the name of this rank's host."""
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
        """Return True if a name is another name of a rank's host."""
        own, other = self._world.hosts[rank].lower(), host.lower()
        if is_loopback(other):
            return self._world.nodes[rank] == self._world.nodes[self._world.rank]
        # One of the names may be fully qualified.
        return own == other or own.startswith(f"{other}.") or other.startswith(f"{own}.")

    def send(self, message: Message) -> None:
        """See :class:`Transport`."""
        if fork.unusable:
            fork.check_mpi()
        peer = message.peer
        is_output = message.has_output_buffers and message.kind == REPLY
        writers = self._reply_writers if is_output else self._writers
        frame, buffers = encode(message, writers[peer])
        if buffers and message.copies_buffers:
            buffers = [array.copy() for array in buffers]
        isend = self._comm.Isend
        with self._send_lock:  # no other message may come between a frame and its buffers
            if self._ended:
                raise CancelledError(f"this rank has left MPI: {message.method} is not sent")
            requests = [isend(frame, peer, FRAME_TAG)]
            if buffers:
                # Kept before each further send, which may raise while MPI still reads the frame.
                self._outgoing.append((peer, requests))
                for chunk in _chunks(buffers):
                    requests.append(isend(chunk, peer, BUFFER_TAG))  # noqa: PERF401
            elif not requests[0].Test():
                self._outgoing.append((peer, requests))
        if self._flags[self._flag_offsets[peer]]:
            self._wake(peer)

    def forget(self, peer: int, request_id: int) -> None:
        """See :class:`Transport`; nothing is sent twice, so there is nothing to forget."""

    def loss(self, peer: int) -> str | None:
        """See :class:`Transport`; a reply sent before the end has time to arrive."""
        since = self._left.get(peer)
        if since is None or time.monotonic() - since <= _LAST_REPLY_S:
            return None
        return "the script there has ended"

    def is_connected(self, address: Address) -> bool:
        """Return whether the script of the rank has not ended; see :class:`Transport`."""
        return address.port % self._world.size not in self._left

    def process_of(self, peer: int) -> str:
        """See :class:`Transport`."""
        return f"rank {peer}"

    def progress(self, *, block: bool = False) -> bool:
        """See :class:`Transport`; returns False at once if another thread polls.

        Args:
            block: Wait for the other thread instead.
        """
        if not self._receive_lock.acquire(block):
            return False
        completed = self._completed
        delivered = False
        try:
            if self._ended:
                return False
            lost = len(self._left)  # before the poll, which may find the last messages of a rank
            probes, self._probes = self._probes, _PROBES
            happened = self._inbox.poll(completed, probes)
            while completed:  # after an exception the next call delivers the others
                delivered = True
                message = completed.popleft()
                receiver = self._receivers.get(message.receiver)
                if receiver is not None:
                    receiver.deliver(message)
                elif message.kind != REPLY:
                    self._keep_or_refuse(message)
            if lost != self._reported_losses:
                self._report_losses(lost, is_quiet=not happened and self._inbox.is_idle())
        finally:
            self._receive_lock.release()
        if self._outgoing:
            self._continue_sending()
        if delivered and self._waker is not None and self._waker.waiting:
            self._waker.wake()
        return happened

    def wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """See :class:`Transport`. The thread sleeps only if all ranks share this node."""
        waker = None if self._outgoing or not self._inbox.is_idle() else self._waker
        if waker is not None:
            waker.wait(seconds, done)
        self._probes = 1  # after a sleep, a message that has arrived is found at once
        return waker is not None

    # Inside

    def _continue_sending(self) -> None:
        """Test MPI's sends, and wake the receiving ranks, because MPI may need their polls."""
        with self._send_lock:
            if self._ended:
                return
            peers = {peer for peer, _ in self._outgoing}
            self._outgoing = [item for item in self._outgoing if not self._testall(item[1])]
        for peer in peers:
            if self._flags[self._flag_offsets[peer]]:
                self._wake(peer)

    def _wake(self, peer: int) -> None:
        peers = self._world.peers
        # An error means that the rank has ended, or that its socket is full, so that the rank is
        # awake. A rank that misses a datagram polls after 40 ms at the latest.
        with contextlib.suppress(OSError):
            peers.socket.sendto(b"", peers.names[peer])

    def _set_idle(self) -> bool:
        self._flags[self._flag_offsets[self._world.rank]] = 1
        # Wait for a thread that polls now: it may have missed a message sent before the flag.
        self._probes = _LAST_PROBES
        return not self.progress(block=True)

    def _clear_idle(self) -> None:
        self._flags[self._flag_offsets[self._world.rank]] = 0
        with contextlib.suppress(BlockingIOError):  # no datagram is left
            for _ in range(_MAX_WAKE_UPS):
                self._world.peers.socket.recv(1)

    def _report_losses(self, lost: int, *, is_quiet: bool) -> None:
        """Report lost ranks to the endpoints, each one behind the last messages of the rank.

        Args:
            lost: Number of ranks that were lost before the poll.
            is_quiet: True if the poll has found nothing, so that all messages are here.
        """
        for rank, since in list(self._left.items())[self._reported_losses : lost]:
            # If messages keep coming, every poll finds one. Report the loss after a second then.
            if not is_quiet and time.monotonic() - since <= _LAST_REPLY_S:
                return
            self._reported_losses += 1
            for receiver in list(self._receivers.values()):
                receiver.peer_lost(self.process_of(rank))

    def _output_buffers(self, message: Message, sizes: Sequence[int]) -> Sequence[Array] | None:
        receiver = self._receivers.get(message.receiver)
        return None if receiver is None else receiver.output_buffers(message, sizes)

    def _keep_or_refuse(self, message: Message) -> None:
        """Keep a message for an endpoint that may open, or refuse it."""
        number = message.receiver
        with self._attach_lock:
            receiver = self._receivers.get(number)
            if receiver is None and (
                self._is_expected(number)
                and number not in self._closed
                and len(self._unclaimed) < _MAX_UNCLAIMED
            ):
                self._unclaimed.append(message)
                return
        if receiver is not None:
            receiver.deliver(message)
        elif message.kind == REQUEST:
            self._refuse(message)

    def _is_expected(self, number: int) -> bool:
        """Return True if callers can know a number of this rank before its endpoint opens."""
        size, rank = self._world.size, self._world.rank
        return number == rank or (number >= AGREED_NUMBERS and number % size == rank)

    def _refuse(self, message: Message) -> None:
        number, size = message.receiver, self._world.size
        failure = Failure(code=UnavailableError.code)
        address = f"mpi://{self.host()}:{number}"
        if number in self._closed:
            failure.message = f"{address} was closed before {message.method}"
        elif self._is_expected(number):
            failure.message = (
                f"{message.method}: {address} is not open yet, and {_MAX_UNCLAIMED} messages wait "
                "for endpoints of this rank already"
            )
        else:
            failure.code = NO_ENDPOINT
            failure.message = (
                f"nothing serves {address}, which {message.method} was sent to: rank "
                f"{self._world.rank} has no endpoint {number} (the ranks are 0 to {size - 1}; "
                "Endpoint.address tells the addresses of further endpoints)"
            )
        self.send(Message(REPLY, message.id, message.sender, peer=message.peer, failure=failure))

    def _end(self) -> None:
        """Leave MPI, which ends now. Late threads must not call it any more."""
        with self._receive_lock, self._send_lock:
            self._ended = True
            self._inbox.close()

    def _close_all(self) -> None:
        for receiver in list(self._receivers.values()):
            receiver.close()


@dataclass(slots=True, eq=False)
class _Incoming:
    """A message that waits for its buffers, or for earlier messages of its rank.

    Attributes:
        message: The message.
        sizes: Size of each buffer in bytes.
        into: The caller's arrays for them, if there are any.
        requests: The receives that were started.
        targets: Views for the chunks still to arrive, the last chunk first. None until the first
            chunk arrives.
        dropped: True if the message cannot be completed.
    """

    message: Message
    sizes: Sequence[int] = ()
    into: Sequence[Array] | None = None
    requests: list[MPI.Request] = field(default_factory=list)
    targets: list[Array] | None = None
    dropped: bool = False

    def target(self, nbytes: int) -> Array | None:
        """Return the array for the next chunk; None if the chunk has the wrong size."""
        if self.targets is None:
            if nbytes != min(next(size for size in self.sizes if size), _CHUNK_BYTES):
                return None
            self.message.buffers = self.into or [np.empty(size, np.uint8) for size in self.sizes]
            self.targets = _chunks([as_bytes(array) for array in self.message.buffers])[::-1]
        return self.targets.pop() if nbytes == self.targets[-1].nbytes else None


class _Inbox:
    """Receives frames and buffers, and puts messages together. Its owner holds a lock.

    Requests and notices of one rank are completed in the order in which they were sent. Replies
    wait for no other message.

    Args:
        comm: Communicator of all messages.
        output_buffers: Returns the caller's arrays for the buffers of a reply.
        shared: The shared buffers of this node's ranks.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        output_buffers: Callable[[Message, Sequence[int]], Sequence[Array] | None],
        shared: Mapping[int, SharedBuffer],
    ) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._probe = partial(comm.Improbe, MPI.ANY_SOURCE, MPI.ANY_TAG)
        self._testall = MPI.Request.Testall
        self._status = MPI.Status()
        self._output_buffers = output_buffers
        self._shared = shared
        # A frame that is being received. Nothing else is probed for until it is here.
        self._frame: tuple[MPI.Request, int, bytearray] | None = None
        self._expecting: dict[int, _Incoming] = {}  # by rank: the message whose buffers come next
        self._incoming: deque[_Incoming] = deque()
        self._bad_peers: set[int] = set()  # ranks that have sent corrupt bytes

    def poll(self, completed: deque[Message], probes: int) -> bool:
        """Receive a frame or a buffer that has arrived.

        Args:
            completed: Completed messages are appended.
            probes: Upper limit of probes.

        Returns:
            True if anything has arrived.
        """
        probed = None
        if self._frame is None:
            for _ in range(probes):
                probed = self._probe(self._status)
                if probed is not None:
                    self._receive(probed)
                    break
        if self._frame is not None:
            request, source, frame = self._frame
            if request.Test():
                self._frame = None
                self._handle_frame(source, frame, completed)
        if self._incoming:
            self._finish(completed)
        return probed is not None or bool(completed)

    def is_idle(self) -> bool:
        """Return True if no transfer is in progress that needs polling."""
        return not (self._incoming or self._frame)

    def close(self) -> None:
        """Receive and drop all late messages, because MPICH warns of messages left at the end."""
        while (late := self._probe(self._status)) is not None:
            late.Recv(bytearray(self._status.count))

    def _receive(self, probed: MPI.Message) -> None:
        """Start to receive a message: a frame, or a buffer straight into place."""
        source, nbytes = self._status.source, self._status.count
        incoming = self._expecting.get(source) if self._expecting else None
        if self._status.tag == FRAME_TAG:
            if incoming is not None:
                self._drop(source, "a frame came in place of a buffer")
            frame = bytearray(nbytes)
            self._frame = probed.Irecv(frame), source, frame
            return
        if incoming is None or (target := incoming.target(nbytes)) is None:
            probed.Recv(bytearray(nbytes))
            self._drop(source, f"a buffer of {nbytes} bytes came that no frame has announced")
            return
        incoming.requests.append(probed.Irecv(target))
        if not incoming.targets:
            del self._expecting[source]

    def _handle_frame(self, source: int, frame: bytearray, completed: deque[Message]) -> None:
        try:
            message, sizes, location = decode(frame, source)
            if location is not None:
                message.buffers = self._read_shared(source, location, sizes)
        except BadFrameError as error:
            self._report(source, str(error))
            return
        if sizes and location is None:
            into = self._output_buffers(message, sizes)
            self._expecting[source] = incoming = _Incoming(message, sizes, into)
            self._incoming.append(incoming)
        elif self._incoming and message.kind != REPLY:
            self._incoming.append(_Incoming(message))  # behind earlier messages of its rank
        else:
            completed.append(message)

    def _read_shared(self, source: int, location: int, sizes: Sequence[int]) -> list[Array]:
        shared = self._shared.get(source)
        if shared is None:
            raise BadFrameError("its buffers are said to be in memory of another node")
        return shared.read(location, sizes)

    def _finish(self, completed: deque[Message]) -> None:
        kept: list[_Incoming] = []
        blocked = set()  # ranks with an incomplete request; their later ones wait
        try:
            while self._incoming:
                incoming = self._incoming[0]
                message = incoming.message
                ordered = message.kind != REPLY
                ended = not (ordered and message.peer in blocked) and self._has_ended(incoming)
                self._incoming.popleft()
                if not ended:
                    kept.append(incoming)
                    if ordered:
                        blocked.add(message.peer)
                elif not incoming.dropped:
                    completed.append(message)
        finally:  # MPI or a signal handler may have raised
            self._incoming.extendleft(reversed(kept))

    def _has_ended(self, incoming: _Incoming) -> bool:
        # The receives of a dropped message must end, too, before their memory can go.
        return incoming is not self._expecting.get(incoming.message.peer) and self._testall(
            incoming.requests
        )

    def _drop(self, source: int, reason: str) -> None:
        """Give up the message that expects buffers of a rank, and report the rank."""
        incoming = self._expecting.pop(source, None)
        if incoming is not None:
            incoming.dropped = True
        self._report(source, reason)

    def _report(self, source: int, reason: str) -> None:
        # A rank that sends corrupt bytes mostly sends many.
        level = logging.DEBUG if source in self._bad_peers else logging.ERROR
        self._bad_peers.add(source)
        own = self._comm.rank
        logger.log(level, "rank %d dropped corrupt bytes from rank %d: %s", own, source, reason)


def _chunks(buffers: Sequence[Array]) -> list[Array]:
    """Return flat buffers in chunks that fit the counts of MPI, without empty buffers."""
    return [
        buffer[start : start + _CHUNK_BYTES]
        for buffer in buffers
        for start in range(0, buffer.nbytes, _CHUNK_BYTES)
    ]


@cache
def mpi_transport() -> MpiTransport:
    """Collective. Return the transport of this rank; the first call starts MPI."""
    return MpiTransport(world())
