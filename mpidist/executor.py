"""Executors carry Ops out; here, the one that hands them to MPI on host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from mpidist.arrays import Finish
from mpidist.errors import DistBackendError
from mpidist.op import LARGEST_COUNT, Op, in_pieces
from mpidist.runtime import Backoff, Waits, fork
from mpidist.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI


class HostExecutor:
    """Carries Ops out through MPI on host memory.

    Args:
        comm: The group's communicator.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        mpi_ops, in_place, any_source = _constants()
        self._run: dict[str, Callable[[Op], None]] = {
            "all_reduce": lambda o: comm.Allreduce(in_place, o.recv, mpi_ops[o.reduce]),
            "reduce": lambda o: comm.Reduce(
                in_place if o.send is None else o.send, o.recv, mpi_ops[o.reduce], o.root
            ),
            "scan": lambda o: comm.Scan(in_place, o.recv, mpi_ops[o.reduce]),
            "exscan": lambda o: comm.Exscan(in_place, o.recv, mpi_ops[o.reduce]),
            "reduce_scatter": lambda o: comm.Reduce_scatter_block(
                o.send, o.recv, mpi_ops[o.reduce]
            ),
            "broadcast": lambda o: comm.Bcast(o.recv, o.root),
            "all_gather": lambda o: comm.Allgather(in_place if o.send is None else o.send, o.recv),
            "all_gather_v": lambda o: comm.Allgatherv(o.send, [o.recv, o.recv_counts]),
            "gather": lambda o: comm.Gather(o.send, o.recv, o.root),
            "gather_v": lambda o: comm.Gatherv(o.send, _counted(o.recv, o.recv_counts), o.root),
            "scatter": lambda o: comm.Scatter(o.send, o.recv, o.root),
            "scatter_v": lambda o: comm.Scatterv(_counted(o.send, o.send_counts), o.recv, o.root),
            "all_to_all": lambda o: comm.Alltoall(o.send, o.recv),
            "all_to_all_v": lambda o: comm.Alltoallv(
                [o.send, o.send_counts], [o.recv, o.recv_counts]
            ),
            "send": lambda o: comm.Send(o.send, o.root, o.tag),
            "recv": self._recv,
            "barrier": lambda o: comm.Barrier(),
        }
        self._start: dict[str, Callable[[Op], MPI.Request]] = {
            "all_reduce": lambda o: comm.Iallreduce(in_place, o.recv, mpi_ops[o.reduce]),
            "reduce": lambda o: comm.Ireduce(
                in_place if o.send is None else o.send, o.recv, mpi_ops[o.reduce], o.root
            ),
            "scan": lambda o: comm.Iscan(in_place, o.recv, mpi_ops[o.reduce]),
            "exscan": lambda o: comm.Iexscan(in_place, o.recv, mpi_ops[o.reduce]),
            "reduce_scatter": lambda o: comm.Ireduce_scatter_block(
                o.send, o.recv, mpi_ops[o.reduce]
            ),
            "broadcast": lambda o: comm.Ibcast(o.recv, o.root),
            "all_gather": lambda o: comm.Iallgather(in_place if o.send is None else o.send, o.recv),
            "all_gather_v": lambda o: comm.Iallgatherv(o.send, [o.recv, o.recv_counts]),
            "gather": lambda o: comm.Igather(o.send, o.recv, o.root),
            "gather_v": lambda o: comm.Igatherv(o.send, _counted(o.recv, o.recv_counts), o.root),
            "scatter": lambda o: comm.Iscatter(o.send, o.recv, o.root),
            "scatter_v": lambda o: comm.Iscatterv(_counted(o.send, o.send_counts), o.recv, o.root),
            "all_to_all": lambda o: comm.Ialltoall(o.send, o.recv),
            "all_to_all_v": lambda o: comm.Ialltoallv(
                [o.send, o.send_counts], [o.recv, o.recv_counts]
            ),
            "send": lambda o: comm.Isend(o.send, o.root, o.tag),
            "recv": lambda o: comm.Irecv(o.recv, any_source if o.root < 0 else o.root, o.tag),
            "barrier": lambda o: comm.Ibarrier(),
        }

    def run(self, op: Op) -> None:
        """Collective, or point to point. Carry an Op out, blocking; recv sets its ``root``."""
        fork.check_mpi()
        run = self._run[op.name]
        if op.count() <= LARGEST_COUNT:
            run(op)
            return
        for piece in in_pieces(op):
            run(piece)
            op.root = piece.root
            if piece.finish is not None:
                piece.finish()

    def start(self, op: Op) -> list[MPI.Request]:
        """Collective, or point to point. Begin an Op; gives MPI's requests."""
        fork.check_mpi()
        pieces = in_pieces(op)
        if len(pieces) > 1:
            op.finish = _one_after_the_other([*[piece.finish for piece in pieces], op.finish])
        return [self._start[op.name](piece) for piece in pieces]

    def _recv(self, op: Op) -> None:
        if op.root >= 0:
            self._comm.Recv(op.recv, op.root, op.tag)
            return
        from mpi4py import MPI

        status = MPI.Status()
        self._comm.Recv(op.recv, MPI.ANY_SOURCE, op.tag, status)
        op.root = status.source


def _counted(buffer: Any, counts: Sequence[int] | None) -> Any:
    return None if buffer is None else [buffer, counts]


def _one_after_the_other(steps: list[Finish]) -> Finish:
    def finish() -> None:
        for step in steps:
            if step is not None:
                step()

    return finish


class RequestWork(Work):
    """A Work that MPI carries out.

    Args:
        op: The operation.
        requests: MPI's requests for it.
        waits: Where a blocked thread says what it waits for.
    """

    def __init__(self, op: Op, requests: list[MPI.Request], waits: Waits) -> None:
        from mpi4py import MPI

        super().__init__(op.name, self._drive_requests)
        self._op = op
        self._requests = requests
        self._statuses = [MPI.Status() for _ in requests]
        self._waits = waits
        self._mpi = MPI
        self._testing = threading.Lock()

    def is_completed(self) -> bool:
        """Local. True once the operation has ended; looks, and never blocks."""
        if not self._done and self._testing.acquire(blocking=False):
            try:
                self._look(self._mpi.Request.Testall)
            finally:
                self._testing.release()
        return self._done

    def _drive_requests(self, work: Work, deadline: float) -> None:
        self._waits.current[id(self._op)] = self._op
        try:
            if deadline == float("inf"):
                with self._testing:
                    if not self._done:
                        self._look(self._mpi.Request.Waitall)
            else:
                backoff = Backoff(spins=5000)
                while not self.is_completed() and time.monotonic() < deadline:
                    backoff.pause()
        finally:
            self._waits.current.pop(id(self._op), None)

    def _look(self, ask: Callable[[list[MPI.Request], list[MPI.Status]], bool]) -> None:
        try:
            if not ask(self._requests, self._statuses):
                return
        except self._mpi.Exception as error:
            self.complete(error=backend_error(self._op, error))
            return
        if self._op.finish is not None:
            self._op.finish()
        group = self._op.group
        source = self._statuses[-1].source if self._op.name == "recv" else -1
        self.complete(group.ranks[source] if source >= 0 else None)


def backend_error(op: Op, error: Exception) -> DistBackendError:
    """Local. What MPI said of an Op, with where and what."""
    return DistBackendError(
        f"{op.describe()} failed on group rank {op.group.rank()} of {op.group.size()}: {error}"
    )


@cache
def _constants() -> tuple[list[MPI.Op], Any, int]:
    """MPI's operations in the order of ReduceOp, MPI_IN_PLACE, and MPI_ANY_SOURCE."""
    from mpi4py import MPI

    ops = [MPI.SUM, MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX, MPI.BAND, MPI.BOR, MPI.BXOR]
    return ops, MPI.IN_PLACE, MPI.ANY_SOURCE
