"""Collectives of which each part is a message of its own, from array to array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays import Array
from mpidist.op import LARGEST_COUNT, RESERVED_TAGS, Op, cut

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = RESERVED_TAGS[0]
# Bytes from which all_gather sends the copy of a part, in its row of the result, and not the part.
# What was just written may be far from the reader's caches, and take MPICH five times as long. But
# it saves reading large arrays twice, and more of the result lies in huge pages.
_SENT_AS_COPY = 2 << 20


class PartsByMessage:
    """Carries Ops out that have parts.

    Args:
        comm: The group's communicator.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._rank, self._size = comm.rank, comm.size
        self._mpi_error = MPI.Exception

    def exchange(self, op: Op) -> None:
        """Collective. Carry an Op out, blocking."""
        rank = self._rank
        if op.name == "all_gather":
            self._pass_round(op)
        elif op.name == "gather" or (op.name == "scatter" and rank != op.root):
            self._send_or_receive(op, rank)
        elif op.name == "all_to_all" and self._size == 2:
            other = 1 - rank
            self._send_and_receive(op.send_parts[other], other, op.recv_parts[other], other)
            _keep_own(op, rank)
        else:
            self._wait_for(self.start(op))

    def _send_or_receive(self, op: Op, rank: int) -> None:
        """One part after the other, in one direction: cheaper than requests."""
        _keep_own(op, rank)
        move = self._comm.Recv if op.recv_parts else self._comm.Send
        failure = None
        for other, part in (op.recv_parts or op.send_parts).items():
            for piece in cut(part) if other != rank else ():
                try:
                    move(piece, other, _TAG)
                except self._mpi_error as error:  # what is left would meet the next operation
                    failure = failure or error
        if failure is not None:
            raise failure

    def _pass_round(self, op: Op) -> None:
        # In a ring each part crosses the network between two nodes once, however many ranks they
        # have (Thakur, Rabenseifner and Gropp 2005, section 4.1).
        rank, size = self._rank, self._size
        left, right = (rank - 1) % size, (rank + 1) % size
        _keep_own(op, rank)
        given = op.send_parts[rank]
        if given.nbytes >= _SENT_AS_COPY:
            given = op.recv_parts[rank]
        for step in range(1, size):
            taken = op.recv_parts[(rank - step) % size]
            self._send_and_receive(given, right, taken, left)
            given = taken

    def _send_and_receive(self, given: Array, target: int, taken: Array, source: int) -> None:
        comm = self._comm
        if max(given.size, taken.size) <= LARGEST_COUNT:
            comm.Sendrecv(given, target, _TAG, taken, source, _TAG)
            return
        requests = [comm.Irecv(piece, source, _TAG) for piece in cut(taken)]
        self._wait_for(requests + [comm.Isend(piece, target, _TAG) for piece in cut(given)])

    def _wait_for(self, requests: list[MPI.Request]) -> None:
        failure = None
        for request in requests:
            try:
                request.Wait()
            except self._mpi_error as error:  # the others may be under way: MPI uses their arrays
                failure = failure or error
        if failure is not None:
            raise failure

    def start(self, op: Op) -> list[MPI.Request]:
        """Collective. Begin an Op; gives MPI's requests."""
        # What a rank gives itself is copied while others fetch what it has for them. Each rank
        # begins with another one.
        comm, rank, size = self._comm, self._rank, self._size
        sources, targets = ([(rank + sign * n) % size for n in range(1, size)] for sign in (-1, 1))
        requests = [
            comm.Irecv(piece, other, _TAG)
            for other in sources
            if other in op.recv_parts
            for piece in cut(op.recv_parts[other])
        ]
        requests += [
            comm.Isend(piece, other, _TAG)
            for other in targets
            if other in op.send_parts
            for piece in cut(op.send_parts[other])
        ]
        _keep_own(op, rank)
        return requests


def _keep_own(op: Op, rank: int) -> None:
    """Put what a rank gives itself where it belongs."""
    given, taken = op.send_parts.get(rank), op.recv_parts.get(rank)
    if given is None or taken is None or given is taken:
        return
    if given.dtype != taken.dtype:  # one is moved as bytes: it lies where MPI's types do not
        given, taken = (array.reshape(-1).view(np.uint8) for array in (given, taken))
    if given.shape == taken.shape:
        taken[...] = given
    else:
        taken.reshape(-1)[...] = given.reshape(-1)
