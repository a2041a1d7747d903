"""Messages on their way to this rank: how frames and the buffers that follow them are reassembled.

The buffers of a message are sent right after its frame, and messages of one rank become visible in
the order in which they were sent (MPI 4.1, 3.5). If the rank's next frame is here and a buffer is
not, the buffer will never arrive. Memory for buffers is allocated when the first one is here and
has the right size. So corrupt bytes take no memory and hold up nothing. They are reported once for
each rank.

A frame that is too long for a posted receive arrives in fragments, which are frames themselves.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpidist.rpc.buffer_pool import BufferPool
from mpidist.rpc.codec import BadFrameError, as_bytes, decode
from mpidist.rpc.message import REPLY, Array, Message
from mpidist.rpc.shared_buffers import SharedBuffer

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

FRAME_TAG = 0
_BUFFER_TAGS = 16384  # every MPI has tags up to 32767
CHUNK_BYTES = 1 << 30  # MPI counts have 32 bits
MAX_FRAME_BYTES = 32768  # size of a posted receive

_POSTED_RECEIVES = 4
_CLEANUP_PERIOD = 64  # fruitless polls between looks for unexpected messages

# A fragment begins with this word, the length of its frame, and its offset there.
_FRAGMENT = struct.Struct("<8sQQ")
_FRAGMENT_MAGIC = b"mpidist>"
_MAX_FRAME_LENGTH = 1 << 30  # of a frame in fragments

OutputBuffers = Callable[[Message, Sequence[int]], Sequence[Array] | None]


def buffer_tag(message: Message) -> int:
    """Return the tag of the buffers that follow a message."""
    return 1 + (message.id + (message.kind == REPLY) * _BUFFER_TAGS // 2) % _BUFFER_TAGS


def fragments(frame: bytes, limit: int) -> list[bytes]:
    """Return a frame in messages of at most ``limit`` bytes: itself, or fragments.

    Raises:
        ValueError: The frame is longer than 1 GiB.
    """
    if len(frame) <= limit:
        return [frame]
    if len(frame) > _MAX_FRAME_LENGTH:
        raise ValueError(
            f"a body of about {len(frame)} bytes is more than a message can have: send it as a "
            "buffer"
        )
    step = limit - _FRAGMENT.size
    return [
        _FRAGMENT.pack(_FRAGMENT_MAGIC, len(frame), start) + frame[start : start + step]
        for start in range(0, len(frame), step)
    ]


def chunks(buffers: Sequence[Array]) -> list[Array]:
    """Return flat buffers in chunks that fit the counts of MPI, without empty buffers."""
    return [
        buffer[start : start + CHUNK_BYTES]
        for buffer in buffers
        for start in range(0, buffer.nbytes, CHUNK_BYTES)
    ]


@dataclass(slots=True, eq=False)
class _Incoming:
    """A message that waits for its buffers, or for earlier messages of its rank.

    Attributes:
        message: The message.
        sizes: Size of each buffer in bytes.
        into: The caller's arrays for them, if there are any.
        tag: Tag of the buffers.
        requests: The receives that were started.
        targets: Where the chunks that have not arrived belong, in reverse order. None before the
            first arrives.
        dropped: True if the message cannot be completed.
    """

    message: Message
    sizes: Sequence[int] = ()
    into: Sequence[Array] | None = None
    tag: int = 0
    requests: list[MPI.Request] = field(default_factory=list)
    targets: list[Array] | None = None
    dropped: bool = False

    def target(self, nbytes: int, pool: BufferPool) -> Array | None:
        """Return the array for the next chunk; None if the chunk has the wrong size."""
        sizes = self.sizes
        if self.targets is None:
            if len(sizes) == 1 and nbytes == sizes[0] <= CHUNK_BYTES:  # the usual case
                self.message.buffers, self.targets = self.into or [pool.allocate(nbytes)], []
                return as_bytes(self.message.buffers[0])
            if nbytes != min(next(size for size in sizes if size), CHUNK_BYTES):
                return None
            self.message.buffers = self.into or [pool.allocate(size) for size in sizes]
            self.targets = chunks([as_bytes(array) for array in self.message.buffers])[::-1]
        elif nbytes != self.targets[-1].nbytes:
            return None
        return self.targets.pop()


class Reassembler:
    """Receives frames and buffers, and puts messages together. Its owner holds a lock.

    Requests and notices of one rank are completed in the order in which they were sent. Replies
    wait for no other message.

    Frames arrive in persistent receives, posted in advance, which is 3 to 15 us faster than a
    matched probe. With MPICH 5.0.2, receives from any source did not get the messages if some
    ranks share a node and others do not (3 ranks on 2 hosts). So frames are probed for if the
    world has several nodes.

    Args:
        comm: Communicator of all messages.
        probe_frames: Probe for frames instead of posting receives.
        output_buffers: Returns the caller's arrays for the buffers of a reply.
        shared: The shared buffers of this node's ranks.
        pool_bytes: Bytes of unused memory to keep for further messages.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        probe_frames: bool,
        output_buffers: OutputBuffers,
        shared: Mapping[int, SharedBuffer],
        pool_bytes: int,
    ) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._output_buffers = output_buffers
        self._any_source, self._any_tag = MPI.ANY_SOURCE, MPI.ANY_TAG
        self._testall = MPI.Request.Testall
        self._status = MPI.Status()
        self._pool = BufferPool(pool_bytes)
        self._shared = shared
        self._posted: list[tuple[MPI.Prequest, memoryview]] = []
        self._next = 0  # the posted receive that gets the next frame
        self._early: dict[int, tuple[int, bytearray]] = {}  # frames of later posted receives
        self._fragments: dict[int, bytearray] = {}  # by rank: the beginning of a long frame
        self._expecting: dict[int, _Incoming] = {}  # by rank: its next messages are buffers of this
        self._incoming: list[_Incoming] = []
        self._bad_peers: set[int] = set()  # ranks that have sent corrupt bytes
        self._unexpected: set[tuple[int, int]] = set()  # ranks and tags of buffers without a frame
        self._idle_polls = 0
        for _ in range(0 if probe_frames else _POSTED_RECEIVES):
            memory = memoryview(bytearray(MAX_FRAME_BYTES))
            request = comm.Recv_init(memory, self._any_source, FRAME_TAG)
            request.Start()
            self._posted.append((request, memory))

    def poll(self, completed: list[Message], tests: int) -> bool:
        """Receive the frames and buffers that have arrived.

        Args:
            completed: Completed messages are appended.
            tests: Upper limit of tests for a frame.

        Returns:
            True if anything has arrived.
        """
        frame = self._take_frame(tests)
        if frame is not None:
            self._unexpected.clear()
            self._handle_frame(*frame, completed)
        else:
            self._idle_polls += 1
            if self._bad_peers or self._unexpected or self._idle_polls % _CLEANUP_PERIOD == 0:
                self._drop_unexpected()
        if self._expecting:
            for source in list(self._expecting):
                self._receive_buffers(source)
        if self._incoming:
            self._finish(completed)
        return frame is not None or bool(completed)

    def is_idle(self) -> bool:
        """Return True if no transfer is in progress that needs polling."""
        return not (self._incoming or self._unexpected)

    def close(self) -> None:
        """Receive and drop all late messages, because MPICH warns of messages left at the end."""
        for number, (request, _) in enumerate(self._posted):
            if number not in self._early:
                request.Cancel()
                request.Wait()
            request.Free()
        self._posted = []
        while (
            late := self._comm.Improbe(self._any_source, self._any_tag, self._status)
        ) is not None:
            late.Recv(bytearray(self._status.count))

    # Frames

    def _take_frame(self, tests: int) -> tuple[int, bytearray] | None:
        """Return the next frame and its source; None if there is none.

        Frames of one rank come in the order of sending: posted receives match in the order of
        posting (MPI 4.1, 3.5), and are tested in that order.
        """
        status = self._status
        if not self._posted:
            probed = self._comm.Improbe(self._any_source, FRAME_TAG, status)
            if probed is None:
                return None
            frame = bytearray(status.count)
            probed.Recv(frame)
            return status.source, frame
        number = self._next
        taken = self._early.pop(number, None) or self._test_posted(number, tests)
        if taken is not None:
            self._posted[number][0].Start()
            self._next = (number + 1) % _POSTED_RECEIVES
        return taken

    def _test_posted(self, number: int, tests: int) -> tuple[int, bytearray] | None:
        request, memory = self._posted[number]
        status, test = self._status, request.Test
        for _ in range(tests):
            if test(status):
                return status.source, bytearray(memory[: status.count])
        return None

    def _has_frames(self) -> bool:
        """Return True if a frame is here, even behind one that is still being received."""
        if not self._posted:
            return self._comm.Iprobe(self._any_source, FRAME_TAG)
        # MPI_Request_get_status would do, but in MPICH 5.0.2 it ends a persistent receive.
        for number in range(_POSTED_RECEIVES):
            if number not in self._early:
                frame = self._test_posted(number, 1)
                if frame is not None:
                    self._early[number] = frame
        return bool(self._early)

    def _handle_frame(self, source: int, frame: bytearray, completed: list[Message]) -> None:
        if self._expecting and source in self._expecting:
            self._receive_buffers(source)
            if source in self._expecting:
                self._drop_expected(source, "a frame came in place of a buffer")
        try:
            if self._fragments or frame.startswith(_FRAGMENT_MAGIC):
                frame = self._join(source, frame)
                if not frame:
                    return
            message, sizes, location = decode(frame, source)
            if location is not None:
                message.buffers = self._read_shared(source, location, sizes)
        except BadFrameError as error:
            self._report(source, str(error))
            return
        if sizes and location is None:
            into = self._output_buffers(message, sizes)
            incoming = _Incoming(message, sizes, into, buffer_tag(message))
            self._incoming.append(incoming)
            self._expecting[source] = incoming
            self._receive_buffers(source)
        elif self._incoming and message.kind != REPLY:
            self._incoming.append(_Incoming(message))  # behind earlier messages of its rank
        else:
            completed.append(message)

    def _read_shared(self, source: int, location: int, sizes: Sequence[int]) -> list[Array]:
        shared = self._shared.get(source)
        if shared is None:
            raise BadFrameError("its buffers are said to be in memory of another node")
        return shared.read(location, sizes)

    def _join(self, source: int, frame: bytearray) -> bytearray:
        """Return a frame, or the frame that a fragment completes; empty if fragments are missing.

        Memory grows with the fragments that arrive, not with the length that they claim.
        """
        begun = self._fragments.pop(source, bytearray())
        if not frame.startswith(_FRAGMENT_MAGIC) or len(frame) <= _FRAGMENT.size:
            if begun:
                self._report(source, "a frame came in place of a fragment")
            return frame
        _, length, start = _FRAGMENT.unpack_from(frame)
        if length > _MAX_FRAME_LENGTH:
            raise BadFrameError(f"a fragment of a frame of {length} bytes came")
        if start == 0:
            begun.clear()
        elif start != len(begun):
            raise BadFrameError(f"a fragment for byte {start} came in place of {len(begun)}")
        begun += memoryview(frame)[_FRAGMENT.size :]
        if len(begun) < length:
            self._fragments[source] = begun
            return bytearray()
        return begun

    # Buffers

    def _receive_buffers(self, source: int) -> None:
        """Receive the visible buffers of the expected message straight into place."""
        incoming, status = self._expecting[source], self._status
        while incoming.targets != []:
            probed = self._comm.Improbe(source, incoming.tag, status)
            if probed is None:
                return
            nbytes = status.count
            target = incoming.target(nbytes, self._pool)
            if target is None:
                probed.Recv(bytearray(nbytes))
                self._drop_expected(source, "a buffer has another size than its frame says")
                return
            incoming.requests.append(probed.Irecv(target))
        del self._expecting[source]

    def _finish(self, completed: list[Message]) -> None:
        waiting, self._incoming = self._incoming, []
        blocked = set()  # ranks with an incomplete request; their later ones wait
        for incoming in waiting:
            message = incoming.message
            ordered = message.kind != REPLY
            if not (ordered and message.peer in blocked) and self._has_ended(incoming):
                if not incoming.dropped:
                    completed.append(message)
                continue
            self._incoming.append(incoming)
            if ordered:
                blocked.add(message.peer)

    def _has_ended(self, incoming: _Incoming) -> bool:
        # The receives of a dropped message must end, too, before their memory can go.
        return incoming is not self._expecting.get(incoming.message.peer) and self._testall(
            incoming.requests
        )

    # Corrupt bytes

    def _drop_unexpected(self) -> None:
        """Drop buffers that no frame has announced.

        A frame could arrive between the two looks. So a buffer is seen in one poll and dropped in a
        later one, if no frame has come between.
        """
        if self._has_frames():
            return
        seen, self._unexpected = self._unexpected, set()
        status = self._status
        for candidate in (*self._bad_peers, self._any_source):
            if not self._comm.Iprobe(candidate, self._any_tag, status):
                continue
            source, tag = status.source, status.tag
            # A frame stays for a posted receive, and messages behind it can wait.
            if tag == FRAME_TAG or source in self._expecting:
                continue
            if (source, tag) not in seen:
                self._unexpected.add((source, tag))
                continue
            probed = self._comm.Improbe(source, tag, status)
            if probed is not None:
                nbytes = status.count
                probed.Recv(bytearray(nbytes))
                self._report(source, f"a buffer of {nbytes} bytes came that no frame has announced")

    def _drop_expected(self, source: int, reason: str) -> None:
        """Give up the message with missing buffers."""
        self._expecting.pop(source).dropped = True
        self._report(source, reason)

    def _report(self, source: int, reason: str) -> None:
        # A rank that sends corrupt bytes mostly sends many.
        level = logging.DEBUG if source in self._bad_peers else logging.ERROR
        self._bad_peers.add(source)
        logger.log(level, "rank %d sent rank %d no message: %s", source, self._comm.rank, reason)
