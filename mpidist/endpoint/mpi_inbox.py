"""Where frames from other ranks arrive: receives that are posted before anything is sent.

To test a posted receive is several times cheaper than to probe for a message and then receive it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

LONGEST_BYTES = 32768
_POSTED = 4


class Inbox:
    """The next frames from any rank; its owner sees that one thread at a time uses it.

    Frames of one rank are received in the order in which they were sent: posted receives are
    matched in the order of their posting (MPI 4.1, 3.5), and looked at in that order.

    Args:
        comm: Communicator.
        tag: Of the frames, none longer than ``LONGEST_BYTES``.

    Attributes:
        status: Of the last test.
    """

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        from mpi4py import MPI

        self.status = MPI.Status()
        self._posted = []
        for _ in range(_POSTED):
            memory = memoryview(bytearray(LONGEST_BYTES))
            request = comm.Recv_init(memory, MPI.ANY_SOURCE, tag)
            request.Start()
            self._posted.append((request, memory))
        self._next = 0

    def take(self) -> tuple[int, bytearray] | None:
        """Local. The next frame and the rank that it came from, or None if there is none."""
        request, memory = self._posted[self._next]
        status = self.status
        if not request.Test(status):
            return None
        source, frame = status.source, bytearray(memory[: status.count])
        request.Start()
        self._next = (self._next + 1) % _POSTED
        return source, frame

    def close(self) -> None:
        """Local. Withdraw the receives."""
        for request, _ in self._posted:
            request.Cancel()
            request.Wait()
            request.Free()
        self._posted = []
