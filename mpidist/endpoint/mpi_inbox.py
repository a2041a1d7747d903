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

    def take(self) -> tuple[int, bytearray] | None:
        """Local. The next frame and the rank that it came from, or None if there is none."""
        number = self._next
        frame = self._ahead.pop(number, None) or self._receive(number)
        if frame is not None:
            self._posted[number][0].Start()
            self._next = (number + 1) % _POSTED
        return frame

    def is_empty(self) -> bool:
        """Local. Whether no frame is here, not even one behind another that is still coming in."""
        for number in range(_POSTED):
            if number not in self._ahead:
                frame = self._receive(number)
                if frame is not None:
                    self._ahead[number] = frame
        return not self._ahead

    def _receive(self, number: int) -> tuple[int, bytearray] | None:
        request, memory = self._posted[number]
        status = self._status
        if not request.Test(status):
            return None
        return status.source, bytearray(memory[: status.count])

    def close(self) -> None:
        """Local. Withdraw the receives."""
        for number, (request, _) in enumerate(self._posted):
            if number not in self._ahead:
                request.Cancel()
                request.Wait()
            request.Free()
        self._posted = []
