"""Reductions of large arrays from member to member, in pieces that stay in the caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import Array
from mpidist.op import RESERVED_TAGS, Op

if TYPE_CHECKING:
    from mpi4py import MPI

IN_CHAINS = ("reduce", "scan", "exscan")
# Members whose arrays differ in length must not take pieces of each other, nor what is left of one
# operation for a part of the next: tags are by the numbers of the operation and of its pieces.
_OPERATIONS, _PIECES = 24, 32
_TAGS = RESERVED_TAGS[200 : 200 + _OPERATIONS * _PIECES]
# Bytes a member from which an array goes by the chain: as many pieces as members are under way at
# once, so that it takes at most about twice as long as between two.
_WORTH_A_CHAIN = 1 << 17
_LARGEST_PIECE = 1 << 19


class Chain:
    """Reduces in a pipeline through the members (Pjesivac-Grbovic et al. 2007, "pipeline").

    Each member receives what those before it have of a piece, reduces its own with it, and passes
    that on while the next piece arrives. So every array is read once and every result moved once,
    however many members there are, and no new memory is needed: the two arrays that MPICH makes for
    each of these operations take the system longer than all else.

    Args:
        comm: The group's communicator.
        mpi_ops: MPI's operations by MpiReduction.
    """

    def __init__(self, comm: MPI.Intracomm, mpi_ops: list[MPI.Op]) -> None:
        self._comm = comm
        self._mpi_ops = mpi_ops
        self._memory = np.empty((2, 0), np.uint8)
        self._sent: tuple[MPI.Request, Array] | None = None

    def or_else(self, at_once: Callable[[Op], Any]) -> Callable[[Op], Any]:
        """Local. What carries an Op out in the chain if it is large, or else as is given."""
        size = self._comm.size
        if size == 1:
            return at_once

        def run(op: Op) -> None:
            array = op.send if op.recv is None else op.recv
            assert array is not None
            if array.nbytes < size * _WORTH_A_CHAIN:
                at_once(op)
            else:
                op.halfway = True
                self._run(op, array)
                op.halfway = False

        return run

    def _run(self, op: Op, array: Array) -> None:
        before, after = self._neighbors(op)
        if before < 0 and op.send is not None:  # which it passes on, as it is
            array = op.send
        own = array.reshape(-1)
        length = max(1, min(_LARGEST_PIECE, own.nbytes // (self._comm.size - 1)) // own.itemsize)
        combine = self._combination(op, own)
        arriving, leaving = self._pieces(own, length)
        pieces = -(-own.size // length)
        tag = _TAGS[op.sequence % _OPERATIONS * _PIECES + pieces % _PIECES]
        for start in range(0, own.size, length):
            passed = mine = own[start : start + length]
            if before >= 0:
                arrived = arriving[: mine.size]
                self._comm.Recv(arrived, before, tag)
                self._wait()
                ends_here = op.name == "scan" or (op.name == "reduce" and after < 0)
                if not ends_here:
                    passed = leaving[: mine.size]
                if ends_here or after >= 0:
                    combine(arrived, mine, passed)
                if op.name == "exscan":
                    mine[...] = arrived
            else:
                self._wait()
            if after >= 0:
                self._sent = self._comm.Isend(passed, after, tag), passed
        self._wait()

    def _wait(self) -> None:
        """Until what was sent last has left. An interrupt leaves it here, with its memory."""
        if self._sent is not None:
            self._sent[0].Wait()
            self._sent = None

    def _neighbors(self, op: Op) -> tuple[int, int]:
        """From whom pieces come, and to whom they go; -1 for nobody."""
        rank, size = self._comm.rank, self._comm.size
        end = op.root if op.name == "reduce" else size - 1
        begin = (end + 1) % size
        return (rank - 1) % size if rank != begin else -1, (rank + 1) % size if rank != end else -1

    def _pieces(self, own: Array, length: int) -> Array:
        """Memory for two: what arrives, and what leaves."""
        nbytes = length * own.itemsize
        if self._memory.shape[1] < nbytes:
            self._memory = np.empty((2, nbytes), np.uint8)
        return self._memory[:, :nbytes].view(own.dtype)

    def _combination(self, op: Op, own: Array) -> Callable[[Array, Array, Array], Any]:
        """What reduces two arrays into a third, which may be the second."""
        mpi_op = self._mpi_ops[op.reduce]
        if mpi_op is self._mpi_ops[0] and own.dtype.char in "fd":
            return np.add  # quicker than MPICH's own, and the same

        def combine(arrived: Array, mine: Array, result: Array) -> None:
            if result is not mine:
                result[...] = mine
            mpi_op.Reduce_local(arrived, result)

        return combine
