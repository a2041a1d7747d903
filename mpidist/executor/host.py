"""The executor that hands Ops to MPI, on host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.arrays import one_after_the_other
from mpidist.executor.chain import IN_CHAINS, Chain
from mpidist.executor.parts import PartsByMessage
from mpidist.op import LARGEST_COUNT, RESERVED_TAGS, Op, in_pieces

if TYPE_CHECKING:
    from mpi4py import MPI

_NEIGHBORS_TAG = RESERVED_TAGS[1]  # and one more for each of their sides


class HostExecutor:
    """Carries Ops out through MPI on host memory.

    Args:
        comm: The group's communicator.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._parts = PartsByMessage(comm)
        self._run = _calls(lambda name: getattr(comm, name))
        self._run["recv"] = self._recv
        chain = Chain(comm, _constants()[0])
        self._run |= {name: chain.or_else(self._run[name]) for name in IN_CHAINS}
        self._start = _calls(lambda name: getattr(comm, f"I{name.lower()}"))

    def run(self, op: Op) -> None:
        """Collective, or point to point. Carry an Op out, blocking; recv sets its ``root``."""
        recv = op.recv
        if recv is None and (op.send_parts or op.recv_parts):
            op.halfway = True
            self._parts.exchange(op)
            op.halfway = False
            return
        run = self._run[op.name]
        if (recv is not None and recv.size <= LARGEST_COUNT) or op.count() <= LARGEST_COUNT:
            run(op)
            return
        pieces = in_pieces(op)
        op.halfway = True
        for piece in pieces:
            piece.root = op.root  # of a message from any member, that of its first piece
            run(piece)
            op.root = piece.root
            if piece.finish is not None:
                piece.finish()
        op.halfway = False

    def start(self, op: Op) -> list[MPI.Request]:
        """Collective, or point to point. Begin an Op; gives MPI's requests."""
        if op.name == "neighbor_all_to_all":
            return self._start_neighbors(op)
        if op.send_parts or op.recv_parts:
            return self._parts.start(op)
        pieces = in_pieces(op)
        if len(pieces) > 1:
            if op.name == "recv" and op.root < 0:
                raise ValueError(
                    f"{op.describe()} moves more than {LARGEST_COUNT} elements, of which pieces of "
                    "several members might mix: name the sender, or receive without async_op and a "
                    "time limit"
                )
            op.finish = one_after_the_other([*[piece.finish for piece in pieces], op.finish])
            op.pieces = pieces  # not all of MPI's requests keep their arrays
        return [self._start[op.name](piece) for piece in pieces]

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


@cache
def _constants() -> tuple[list[MPI.Op], Any, int]:
    """Return MPI's operations by MpiReduction, MPI_IN_PLACE, and MPI_ANY_SOURCE."""
    from mpi4py import MPI

    ops = [MPI.SUM, MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX, MPI.BAND, MPI.BOR, MPI.BXOR]
    ops += [MPI.OP_NULL, MPI.Op.Create(_add_wrapping, commute=True)]  # PREMUL_SUM ends as a SUM
    return ops, MPI.IN_PLACE, MPI.ANY_SOURCE


def _add_wrapping(source: Any, target: Any, datatype: MPI.Datatype) -> None:
    """Add 8- or 16-bit integers modulo 2^n (MPI 4.1, 6.9.5), signed ones by the same bits.

    An error ends the job, since mpi4py cannot pass it through MPI. That includes the exception of a
    signal handler that happens to run here.
    """
    dtype = np.uint8 if datatype.Get_size() == 1 else np.uint16
    total = np.frombuffer(target, dtype)
    np.add(total, np.frombuffer(source, dtype), out=total)
