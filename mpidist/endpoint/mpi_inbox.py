"""Where frames from other ranks arrive.

To test a receive that was posted before anything was sent is cheaper than to probe for a message
and then receive it. But with MPICH 5.0.2, where some ranks share a node and others do not (3 ranks
on 2 hosts), posted receives from any rank did not get the messages, for whatever reason: where
there are several nodes frames are probed for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mpi4py import MPI

LONGEST_BYTES = 32768
_POSTED = 4


class Inbox(Protocol):
    """The next frames from any rank; its owner sees that one thread at a time uses it."""

    def take(self, tests: int) -> tuple[int, bytearray] | None:
        """Local. The next frame and the rank that it came from, or None if there is none.

        Args:
            tests: How often to look, at most, where that costs little.
        """

    def is_empty(self) -> bool:
        """Local. Whether no frame is here, not even one behind another that is still coming in."""

    def close(self) -> None:
        """Local. Receive nothing more."""


def open_inbox(comm: MPI.Comm, tag: int, nodes: int) -> Inbox:
    """Local. An inbox for the frames of all ranks.

    Args:
        comm: Communicator.
        tag: Of the frames, none longer than ``LONGEST_BYTES``.
        nodes: On how many nodes the ranks are.
    """
    return PostedInbox(comm, tag) if nodes == 1 else ProbedInbox(comm, tag)


class PostedInbox:
    """Posted receives; arguments as :func:`open_inbox`.

    Frames of one rank are received in the order in which they were sent: posted receives are
    matched in the order of their posting (MPI 4.1, 3.5), and looked at in that order.
    """

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        from mpi4py import MPI

        self._status = MPI.Status()
        self._posted = []
        for _ in range(_POSTED):
            memory = memoryview(bytearray(LONGEST_BYTES))
            request = comm.Recv_init(memory, MPI.ANY_SOURCE, tag)
            request.Start()
            self._posted.append((request, memory))
        self._next = 0
        self._ahead: dict[int, tuple[int, bytearray]] = {}  # of those after the next

    def take(self, tests: int) -> tuple[int, bytearray] | None:
        """Local. See :class:`Inbox`."""
        number = self._next
        frame = self._ahead.pop(number, None) or self._receive(number, tests)
        if frame is not None:
            self._posted[number][0].Start()
            self._next = (number + 1) % _POSTED
        return frame

    def is_empty(self) -> bool:
        """Local. See :class:`Inbox`."""
        for number in range(_POSTED):
            if number not in self._ahead:
                frame = self._receive(number, 1)
                if frame is not None:
                    self._ahead[number] = frame
        return not self._ahead

    def _receive(self, number: int, tests: int) -> tuple[int, bytearray] | None:
        request, memory = self._posted[number]
        status, test = self._status, request.Test
        for _ in range(tests):
            if test(status):
                return status.source, bytearray(memory[: status.count])
        return None

    def close(self) -> None:
        """Local. Withdraw the receives."""
        for number, (request, _) in enumerate(self._posted):
            if number not in self._ahead:
                request.Cancel()
                request.Wait()
            request.Free()
        self._posted = []


class ProbedInbox:
    """Matched probes; arguments as :func:`open_inbox`."""

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._frames = (MPI.ANY_SOURCE, tag)
        self._status = MPI.Status()

    def take(self, tests: int) -> tuple[int, bytearray] | None:
        """Local. See :class:`Inbox`."""
        status = self._status
        probed = self._comm.Improbe(*self._frames, status)
        if probed is None:
            return None
        source, frame = status.source, bytearray(status.count)
        probed.Recv(frame)
        return source, frame

    def is_empty(self) -> bool:
        """Local. See :class:`Inbox`."""
        return not self._comm.Iprobe(*self._frames)

    def close(self) -> None:
        """Local. See :class:`Inbox`; nothing to do."""
