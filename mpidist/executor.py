"""Executors carry Ops out; here, the one that hands them to MPI on host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from mpidist.arrays import Array, one_after_the_other
from mpidist.errors import DistBackendError
from mpidist.op import LARGEST_COUNT, RESERVED_TAGS, Op, cut, in_pieces
from mpidist.runtime import Backoff, Waits
from mpidist.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI


_PARTS_TAG = RESERVED_TAGS[0]
_NEIGHBORS_TAG = _PARTS_TAG + 1  # and one more for each of their sides


class HostExecutor:
    """Carries Ops out through MPI on host memory.

    Args:
        comm: The group's communicator.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._mpi_error = MPI.Exception
        self._run = _calls(lambda name: getattr(comm, name))
        self._run["recv"] = self._recv
        self._start = _calls(lambda name: getattr(comm, f"I{name.lower()}"))

    def run(self, op: Op) -> None:
        """Collective, or point to point. Carry an Op out, blocking; recv sets its ``root``."""
        recv = op.recv
        if recv is None and (op.send_parts or op.recv_parts):
            self._exchange_parts(op)
            return
        run = self._run[op.name]
        if (recv is not None and recv.size <= LARGEST_COUNT) or op.count() <= LARGEST_COUNT:
            run(op)
            return
        for piece in in_pieces(op):
            run(piece)
            op.root = piece.root
            if piece.finish is not None:
                piece.finish()

    def start(self, op: Op) -> list[MPI.Request]:
        """Collective, or point to point. Begin an Op; gives MPI's requests."""
        if op.name == "neighbor_all_to_all":
            return self._start_neighbors(op)
        if op.send_parts or op.recv_parts:
            return self._start_parts(op)
        pieces = in_pieces(op)
        if len(pieces) > 1:
            op.finish = one_after_the_other([*[piece.finish for piece in pieces], op.finish])
        return [self._start[op.name](piece) for piece in pieces]

    def _exchange_parts(self, op: Op) -> None:
        rank, size = op.group.rank(), op.group.size()
        if op.name == "all_gather":
            self._pass_round(op)
        elif op.name == "gather" or (op.name == "scatter" and rank != op.root):
            self._send_or_receive(op, rank)
        elif op.name == "all_to_all" and size == 2:
            other = 1 - rank
            self._send_and_receive(op.send_parts[other], other, op.recv_parts[other], other)
            _keep_own(op, rank)
        else:
            self._wait_for(self._start_parts(op))

    def _send_or_receive(self, op: Op, rank: int) -> None:
        """One part after the other, in one direction: cheaper than requests."""
        _keep_own(op, rank)
        comm, are_received = self._comm, bool(op.recv_parts)
        for other, part in (op.recv_parts or op.send_parts).items():
            for piece in cut(part) if other != rank else ():
                if are_received:
                    comm.Recv(piece, other, _PARTS_TAG)
                else:
                    comm.Send(piece, other, _PARTS_TAG)

    def _pass_round(self, op: Op) -> None:
        # In a ring each part crosses the network between two nodes once, however many ranks they
        # have (Thakur, Rabenseifner and Gropp 2005, section 4.1). What is sent first is the array
        # itself: its copy, just written, at times takes MPICH five times as long.
        rank, size = op.group.rank(), op.group.size()
        left, right = (rank - 1) % size, (rank + 1) % size
        _keep_own(op, rank)
        given = op.send_parts[rank]
        for step in range(1, size):
            taken = op.recv_parts[(rank - step) % size]
            self._send_and_receive(given, right, taken, left)
            given = taken

    def _send_and_receive(self, given: Array, target: int, taken: Array, source: int) -> None:
        comm = self._comm
        if max(given.size, taken.size) <= LARGEST_COUNT:
            comm.Sendrecv(given, target, _PARTS_TAG, taken, source, _PARTS_TAG)
            return
        requests = [comm.Irecv(piece, source, _PARTS_TAG) for piece in cut(taken)]
        self._wait_for(requests + [comm.Isend(piece, target, _PARTS_TAG) for piece in cut(given)])

    def _wait_for(self, requests: list[MPI.Request]) -> None:
        failure = None
        for request in requests:
            try:
                request.Wait()
            except self._mpi_error as error:  # the others may be under way: MPI uses their arrays
                failure = failure or error
        if failure is not None:
            raise failure

    def _start_parts(self, op: Op) -> list[MPI.Request]:
        # What a rank gives itself is copied while others fetch what it has for them. Each rank
        # begins with another one.
        comm, rank, size = self._comm, op.group.rank(), op.group.size()
        sources, targets = ([(rank + sign * n) % size for n in range(1, size)] for sign in (-1, 1))
        requests = [
            comm.Irecv(piece, other, _PARTS_TAG)
            for other in sources
            if other in op.recv_parts
            for piece in cut(op.recv_parts[other])
        ]
        requests += [
            comm.Isend(piece, other, _PARTS_TAG)
            for other in targets
            if other in op.send_parts
            for piece in cut(op.send_parts[other])
        ]
        _keep_own(op, rank)
        return requests

    def _start_neighbors(self, op: Op) -> list[MPI.Request]:
        # Open MPI's Ineighbor_alltoall mixes up the parts of a member that is both neighbours.
        assert op.send is not None
        assert op.recv is not None
        grid = cast("MPI.Cartcomm", self._comm)
        sides = [rank for dimension in range(grid.ndim) for rank in grid.Shift(dimension, 1)]
        given, taken = (buffer.reshape(len(sides), -1) for buffer in (op.send, op.recv))
        receives = [
            grid.Irecv(taken[side], rank, _NEIGHBORS_TAG + side) for side, rank in enumerate(sides)
        ]
        # What leaves on one side arrives, there, on the opposite one.
        sends = [
            grid.Isend(given[side], rank, _NEIGHBORS_TAG + (side ^ 1))
            for side, rank in enumerate(sides)
        ]
        return receives + sends

    def _recv(self, op: Op) -> None:
        if op.root >= 0:
            self._comm.Recv(op.recv, op.root, op.tag)
            return
        from mpi4py import MPI

        status = MPI.Status()
        self._comm.Recv(op.recv, MPI.ANY_SOURCE, op.tag, status)
        op.root = status.source


def _calls(method: Callable[[str], Callable[..., Any]]) -> dict[str, Callable[[Op], Any]]:
    """How each operation is given to MPI.

    Args:
        method: Gives the communicator's method of a name, blocking or not.
    """
    mpi_ops, in_place, any_source = _constants()
    all_reduce, reduce, scan, exscan, reduce_scatter = map(
        method, ("Allreduce", "Reduce", "Scan", "Exscan", "Reduce_scatter_block")
    )
    broadcast, all_gather, all_gather_v, gather, scatter = map(
        method, ("Bcast", "Allgather", "Allgatherv", "Gather", "Scatter")
    )
    all_to_all, send, recv, barrier = map(method, ("Alltoall", "Send", "Recv", "Barrier"))
    return {
        "all_reduce": lambda o: all_reduce(in_place, o.recv, mpi_ops[o.reduce]),
        "reduce": lambda o: reduce(
            in_place if o.send is None else o.send, o.recv, mpi_ops[o.reduce], o.root
        ),
        "scan": lambda o: scan(in_place, o.recv, mpi_ops[o.reduce]),
        "exscan": lambda o: exscan(
            in_place if o.send is None else o.send, o.recv, mpi_ops[o.reduce]
        ),
        "reduce_scatter": lambda o: reduce_scatter(o.send, o.recv, mpi_ops[o.reduce]),
        "broadcast": lambda o: broadcast(o.recv, o.root),
        "all_gather": lambda o: all_gather(o.send, o.recv),
        "all_gather_v": lambda o: all_gather_v(o.send, [o.recv, o.recv_counts]),
        "gather": lambda o: gather(o.send, o.recv, o.root),
        "scatter": lambda o: scatter(o.send, o.recv, o.root),
        "all_to_all": lambda o: all_to_all(o.send, o.recv),
        "send": lambda o: send(o.send, o.root, o.tag),
        "recv": lambda o: recv(o.recv, any_source if o.root < 0 else o.root, o.tag),
        "barrier": lambda o: barrier(),
        # Which only communicators with a topology have.
        "neighbor_all_gather": lambda o: method("Neighbor_allgather")(o.send, o.recv),
        "neighbor_all_to_all": lambda o: method("Neighbor_alltoall")(o.send, o.recv),
    }


def _keep_own(op: Op, rank: int) -> None:
    """Put what a rank gives itself where it belongs."""
    given, taken = op.send_parts.get(rank), op.recv_parts.get(rank)
    if given is None or taken is None or given is taken:
        return
    if given.shape == taken.shape:
        taken[...] = given
    else:
        taken.reshape(-1)[...] = given.reshape(-1)


class RequestWork(Work):
    """A Work that MPI carries out.

    Args:
        op: The operation.
        requests: MPI's requests for it.
        waits: Where a blocked thread says what it waits for.
        begun: Where the group keeps its works by ``id``, until they end.
    """

    def __init__(
        self,
        op: Op,
        requests: list[MPI.Request],
        waits: Waits,
        begun: dict[int, RequestWork],
    ) -> None:
        from mpi4py import MPI

        super().__init__(op.name, self._drive_requests)
        self._op = op
        self._requests = requests
        self._status = MPI.Status()
        self._waits = waits
        self._begun = begun
        self._mpi_error = MPI.Exception
        self._testing = threading.Lock()
        self._failure: Exception | None = None

    def is_completed(self) -> bool:
        """Local. True once the operation has ended; looks, and never blocks."""
        if not self._done and self._testing.acquire(blocking=False):
            try:
                self._look(wait=False)
            finally:
                self._testing.release()
        return self._done

    def _drive_requests(self, work: Work, deadline: float) -> None:
        self._waits.current[id(self._op)] = self._op
        try:
            if deadline == float("inf"):
                with self._testing:
                    if not self._done:
                        self._look(wait=True)
            else:
                backoff = Backoff(spins=5000)
                while not self.is_completed() and time.monotonic() < deadline:
                    backoff.pause()
        finally:
            self._waits.current.pop(id(self._op), None)

    def _look(self, *, wait: bool) -> None:
        while self._requests:
            try:
                if wait:
                    self._requests[-1].Wait(self._status)
                elif not self._requests[-1].Test(self._status):
                    return
            except self._mpi_error as error:  # the others may be under way: MPI uses their arrays
                self._failure = self._failure or error
            self._requests.pop()
        if self._failure is not None:
            self._end(error=backend_error(self._op, self._failure))
            return
        try:
            if self._op.finish is not None:
                self._op.finish()
        except Exception as error:  # the arrays have become read-only, or memory is short
            self._end(error=error)
            return
        group = self._op.group
        source = self._status.source if self._op.name == "recv" else -1
        self._end(group.ranks[source] if source >= 0 else None)

    def _end(self, value: int | None = None, error: BaseException | None = None) -> None:
        self._begun.pop(id(self), None)
        self.complete(value, error)


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
