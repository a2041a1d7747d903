"""Messages on their way to this rank: how frames and the buffers that follow them become whole.

The buffers of a message are sent right after its frame, and what a rank sends becomes visible in
that order (MPI 4.1, 3.5): when the rank's next frame is here and a buffer is not, it will never
come. No memory is set aside for buffers before the first is here and has the right size. So bytes
that are no message, from whatever fault, take no memory, are waited for by nobody, and are told.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpidist.endpoint.frames import BadFrameError, unpack
from mpidist.endpoint.message import REPLY, Array, Message, as_bytes
from mpidist.endpoint.mpi_inbox import Inbox
from mpidist.endpoint.pool import Pool
from mpidist.endpoint.shelf import Shelf

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

FRAME_TAG = 0
_BUFFER_TAGS = 16384
LONG_FRAME_TAG = _BUFFER_TAGS + 1  # below every MPI's smallest upper bound for tags, 32767
PIECE_BYTES = 1 << 30
_STRAYS_PERIOD = 64  # in looks at an empty inbox

# Goes in place of a frame that is longer than an inbox takes, and has its length.
ANNOUNCEMENT = struct.Struct("<8sQ")
ANNOUNCES = b"mpidist>"


IntoOf = Callable[[Message, Sequence[int]], Sequence[Array] | None]


def buffer_tag(message: Message) -> int:
    """Local. Under which tag the buffers of a message follow."""
    return 1 + (message.id + (message.kind == REPLY) * _BUFFER_TAGS // 2) % _BUFFER_TAGS


def pieces(views: Sequence[Array]) -> list[Array]:
    """Local. Buffers in pieces whose length fits MPI's 32-bit counts; empty ones are not sent."""
    return [
        view[start : start + PIECE_BYTES]
        for view in views
        for start in range(0, view.nbytes, PIECE_BYTES)
    ]


@dataclass(slots=True, eq=False)
class _LongFrame:
    request: MPI.Request
    frame: bytearray
    behind: list[bytearray] = field(default_factory=list)  # later frames of the same rank


@dataclass(slots=True, eq=False)
class _Found:
    """A buffer that has come."""

    source: int
    tag: int
    count: int
    probed: MPI.Message


@dataclass(slots=True, eq=False)
class _Arrival:
    """A message that arrives, or that waits for earlier ones of its rank."""

    message: Message
    sizes: Sequence[int] = ()
    into: Sequence[Array] | None = None
    tag: int = 0
    requests: list[MPI.Request] = field(default_factory=list)
    places: list[Array] | None = None  # of the buffers that have not come; None before the first
    dropped: bool = False

    def place(self, nbytes: int, pool: Pool) -> Array | None:
        """Local. Where what has come next goes; None if it has not the size of what should."""
        sizes = self.sizes
        if self.places is None:
            if len(sizes) == 1 and nbytes == sizes[0] <= PIECE_BYTES:  # as a rule
                self.message.buffers, self.places = self.into or [pool.take(nbytes)], []
                return as_bytes(self.message.buffers[0])
            if nbytes != min(sizes[0] or next(size for size in sizes if size), PIECE_BYTES):
                return None
            self.message.buffers = self.into or [pool.take(size) for size in sizes]
            self.places = pieces([as_bytes(array) for array in self.message.buffers])[::-1]
        elif nbytes != self.places[-1].nbytes:
            return None
        return self.places.pop()


class Arrivals:
    """Puts messages together; its owner sees that one thread at a time uses it.

    Requests and notices of one rank come out in the order in which they were sent; replies are
    held up by nothing.

    Args:
        comm: Communicator of all messages.
        inbox: Of the frames among them.
        into: Given a reply and the sizes of its buffers, the arrays that these belong into.
        shelves: Of the ranks of this node.
        idle_bytes: How much memory is kept to be used again.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        inbox: Inbox,
        into: IntoOf,
        shelves: Mapping[int, Shelf],
        idle_bytes: int,
    ) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._into = into
        self._any = (MPI.ANY_SOURCE, MPI.ANY_TAG)
        self._testall = MPI.Request.Testall
        self._status = MPI.Status()
        self._pool = Pool(idle_bytes)
        self._inbox = inbox
        self._shelves = shelves
        self._long: dict[int, _LongFrame] = {}
        self._following: dict[int, _Arrival] = {}  # by rank: its next messages are buffers of this
        self._arriving: list[_Arrival] = []
        self._suspects: set[int] = set()  # ranks that have sent what is no message
        self._found: dict[int, _Found] = {}  # by rank: a buffer whose frame may still come
        self._idle_polls = 0

    def poll(self, whole: list[Message], tests: int) -> bool:
        """Local. Look at what has come.

        Args:
            whole: Messages that are complete are appended.
            tests: How often to look for a frame, at most.

        Returns:
            Whether anything has.
        """
        arrived = self._inbox.take(tests)
        if arrived is not None:
            self._take_frame(*arrived, whole)
        else:
            self._idle_polls += 1
            if self._suspects or self._found or self._idle_polls % _STRAYS_PERIOD == 0:
                self._drop_strays()
        if self._long:
            self._finish_long_frames(whole)
        if self._following:
            for source in list(self._following):
                self._match(source)
        if self._arriving:
            self._finish(whole)
        return arrived is not None or bool(whole)

    def is_idle(self) -> bool:
        """Local. Whether nothing is on its way that only more looks would bring here."""
        return not (self._arriving or self._long or self._found)

    def drop_all(self) -> None:
        """Local. Take what came too late for anybody: MPICH warns of messages left at the end."""
        self._inbox.close()
        for found in self._found.values():
            found.probed.Recv(bytearray(found.count))
        while (late := self._probe(*self._any)) is not None:
            late.probed.Recv(bytearray(late.count))

    def _take_frame(self, source: int, frame: bytearray, whole: list[Message]) -> None:
        if self._long and source in self._long:
            self._long[source].behind.append(frame)
            return
        if self._following and source in self._following:
            self._match(source)
            if source in self._following:
                self._drop(source, "a frame came in place of a buffer")
        try:
            if frame.startswith(ANNOUNCES) and len(frame) == ANNOUNCEMENT.size:
                self._begin_long_frame(source, ANNOUNCEMENT.unpack(frame)[1])
                return
            message, sizes, place = unpack(frame, source)
            if place is not None:
                message.buffers = self._fetch(source, sizes, place)
        except BadFrameError as error:
            self._report(source, str(error))
            return
        if sizes and place is None:
            into = self._into(message, sizes)
            self._expect(_Arrival(message, sizes, into, buffer_tag(message)))
        elif self._arriving and message.kind != REPLY:
            self._arriving.append(_Arrival(message))  # an earlier one of its rank may not be here
        else:
            whole.append(message)

    def _fetch(self, source: int, sizes: Sequence[int], place: int) -> list[Array]:
        """The buffers that a rank has put on its shelf."""
        shelf = self._shelves.get(source)
        if shelf is None:
            raise BadFrameError("its buffers are said to lie in the memory of another node")
        return shelf.take(place, sizes)

    def _begin_long_frame(self, source: int, nbytes: int) -> None:
        if nbytes > PIECE_BYTES:
            raise BadFrameError(f"a first frame of {nbytes} bytes is announced")
        memory = bytearray(nbytes)
        found = self._found.get(source)
        if found is not None and found.tag == LONG_FRAME_TAG and found.count <= nbytes:
            request = self._found.pop(source).probed.Irecv(memory)
        else:
            request = self._comm.Irecv(memory, source, LONG_FRAME_TAG)
        self._long[source] = _LongFrame(request, memory)

    def _finish_long_frames(self, whole: list[Message]) -> None:
        for source in [source for source, long in self._long.items() if long.request.Test()]:
            long = self._long.pop(source)
            for frame in (long.frame, *long.behind):
                self._take_frame(source, frame, whole)

    # Buffers

    def _expect(self, arrival: _Arrival) -> None:
        source = arrival.message.peer
        self._arriving.append(arrival)
        self._following[source] = arrival
        self._match(source)

    def _match(self, source: int) -> None:
        """Receive the buffers that are visible, straight into place."""
        arrival = self._following[source]
        while arrival.places != []:
            found = self._next_buffer(source, arrival.tag)
            if found is None:
                return
            place = arrival.place(found.count, self._pool)
            if place is None:
                self._drop_stray(found)
                self._drop(source, "a buffer has another size than its frame says")
                return
            arrival.requests.append(found.probed.Irecv(place))
        del self._following[source]

    def _next_buffer(self, source: int, tag: int) -> _Found | None:
        found = self._found.get(source)
        if found is not None and found.tag == tag:
            return self._found.pop(source)
        return self._probe(source, tag)

    def _probe(self, source: int, tag: int) -> _Found | None:
        status = self._status
        probed = self._comm.Improbe(source, tag, status)
        return None if probed is None else _Found(source, status.tag, status.count, probed)

    def _finish(self, whole: list[Message]) -> None:
        arriving, self._arriving = self._arriving, []
        held = set()  # ranks whose later requests must wait
        for arrival in arriving:
            message = arrival.message
            ordered = message.kind != REPLY
            if not (ordered and message.peer in held) and self._has_ended(arrival):
                if not arrival.dropped:
                    whole.append(message)
                continue
            self._arriving.append(arrival)
            if ordered:
                held.add(message.peer)

    def _has_ended(self, arrival: _Arrival) -> bool:
        # Buffers that are on their way need their place, even if the message is dropped.
        return arrival is not self._following.get(arrival.message.peer) and self._testall(
            arrival.requests
        )

    # What is no message

    def _drop_strays(self) -> None:
        """Take what no frame has announced; where frames wait it may be what they announce.

        The frame may have come in the same moment: what is found is judged at the next look.
        """
        if not self._inbox.is_empty():
            return
        for source in [source for source in self._found if not self._is_busy(source)]:
            self._drop_stray(self._found.pop(source))
        status = self._status
        anybody, any_tag = self._any
        for suspect in (*self._suspects, anybody):
            if not self._comm.Iprobe(suspect, any_tag, status):
                continue
            source, tag = status.source, status.tag
            # A frame that finds the inbox full is left for it; what lies behind can wait.
            if tag != FRAME_TAG and source not in self._found and not self._is_busy(source):
                stray = self._probe(source, tag)
                if stray is not None:
                    self._found[source] = stray

    def _is_busy(self, source: int) -> bool:
        """Whether buffers are expected from a rank, or a frame of it is still coming in."""
        return source in self._following or source in self._long

    def _drop_stray(self, found: _Found) -> None:
        found.probed.Recv(bytearray(found.count))
        reason = f"a buffer of {found.count} bytes came that no frame has announced"
        self._report(found.source, reason)

    def _drop(self, source: int, reason: str) -> None:
        """Give up the message whose buffers should come from a rank next."""
        self._following.pop(source).dropped = True
        self._report(source, reason)

    def _report(self, source: int, reason: str) -> None:
        level = logging.DEBUG if source in self._suspects else logging.ERROR
        self._suspects.add(source)  # whoever sends garbage sends much of it
        logger.log(level, "rank %d sent rank %d no message: %s", source, self._comm.rank, reason)
