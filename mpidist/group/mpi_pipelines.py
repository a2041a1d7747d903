"""Collectives that mpidist builds from messages, because MPI's own are slower or copy more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.buffers.host_view import Array
from mpidist.group.operation import RESERVED_TAGS, Op, split_counts

if TYPE_CHECKING:
    from mpi4py import MPI

PIPELINED = ("reduce", "scan", "exscan")
# A tag has the number of the operation modulo 24 and the number of its segments modulo 32. So a
# segment of an array of another length, or of an aborted operation, rarely matches a receive.
_OPERATIONS, _SEGMENTS = 24, 32
_TAGS = RESERVED_TAGS[200 : 200 + _OPERATIONS * _SEGMENTS]
# Bytes for each member from which the pipeline is used. As many segments as members are then under
# way at once, and the pipeline takes at most about twice the time between two ranks.
_MIN_PIPELINE_BYTES = 1 << 17
_MAX_SEGMENT_BYTES = 1 << 19
_PART_TAG = RESERVED_TAGS[0]
# Parts of at least this size are copied into the result first, and all_gather sends the copy.
# Smaller parts are sent from the array of the caller. Measured with arrays that were just written:
# at 16 MiB the copy is up to 15 % faster, at 1 to 4 MiB the array is 1.2 to 1.8 times as fast.
_MIN_SENT_AS_COPY_BYTES = 16 << 20


class ReductionPipeline:
    """Reduces large arrays segment by segment along the ranks.

    The algorithm is "pipeline" of Pjesivac-Grbovic et al., 2007. Each rank receives the partial
    result of a segment, reduces its own segment into it, and sends it on while the next segment
    arrives. Every array is read once and every result is sent once, whatever the number of ranks.
    No large memory is allocated. MPICH allocates two arrays for each of these operations, and
    the page faults take more time than all else.

    Args:
        comm: The communicator of the group.
        mpi_ops: MPI's operations, by MpiReduction.
    """

    def __init__(self, comm: MPI.Intracomm, mpi_ops: list[MPI.Op]) -> None:
        self._comm = comm
        self._mpi_ops = mpi_ops
        self._memory = np.empty((2, 0), np.uint8)
        self._sent: tuple[MPI.Request, Array] | None = None

    def for_large(self, run_small: Callable[[Op], Any]) -> Callable[[Op], Any]:
        """Return a function that runs large Ops in the pipeline and others by ``run_small``."""
        size = self._comm.size
        if size == 1:
            return run_small

        def run(op: Op) -> None:
            array = op.send if op.recv is None else op.recv
            assert array is not None
            if array.nbytes < size * _MIN_PIPELINE_BYTES:
                run_small(op)
            else:
                op.halfway = True
                self._run(op, array)
                op.halfway = False

        return run

    def _run(self, op: Op, array: Array) -> None:
        source, target = self._neighbors(op)
        if source < 0 and op.send is not None:  # the first rank sends its array unchanged
            array = op.send
        own = array.reshape(-1)
        length = max(
            1, min(_MAX_SEGMENT_BYTES, own.nbytes // (self._comm.size - 1)) // own.itemsize
        )
        combine = self._combination(op, own)
        arriving, leaving = self._buffers(own, length)
        segments = -(-own.size // length)
        keeps_arrived = op.name == "exscan" and target < 0
        tag = _TAGS[op.sequence % _OPERATIONS * _SEGMENTS + segments % _SEGMENTS]
        for start in range(0, own.size, length):
            result = mine = own[start : start + length]
            if source >= 0:
                arrived = mine if keeps_arrived else arriving[: mine.size]
                self._comm.Recv(arrived, source, tag)
                self._wait_for_sent()
                in_place = op.name == "scan" or (op.name == "reduce" and target < 0)
                if not in_place:
                    result = leaving[: mine.size]
                if in_place or target >= 0:
                    combine(arrived, mine, result)
                if op.name == "exscan" and not keeps_arrived:
                    mine[...] = arrived
            else:
                self._wait_for_sent()
            if target >= 0:
                self._sent = self._comm.Isend(result, target, tag), result
        self._wait_for_sent()

    def _wait_for_sent(self) -> None:
        """Wait until the last segment has been sent. After an interrupt it stays referenced."""
        if self._sent is not None:
            self._sent[0].Wait()
            self._sent = None

    def _neighbors(self, op: Op) -> tuple[int, int]:
        """Return the ranks before and after this one in the pipeline; -1 at its ends."""
        rank, size = self._comm.rank, self._comm.size
        last = op.root if op.name == "reduce" else size - 1
        first = (last + 1) % size
        source = -1 if rank == first else (rank - 1) % size
        target = -1 if rank == last else (rank + 1) % size
        return source, target

    def _buffers(self, own: Array, length: int) -> Array:
        """Return buffers for the arriving and the leaving segment, shape (2, length)."""
        nbytes = length * own.itemsize
        if self._memory.shape[1] < nbytes:
            self._memory = np.empty((2, nbytes), np.uint8)
        return self._memory[:, :nbytes].view(own.dtype)

    def _combination(self, op: Op, own: Array) -> Callable[[Array, Array, Array], Any]:
        """Return a function that reduces two arrays into a third, which may be the second."""
        mpi_op = self._mpi_ops[op.reduce]
        if mpi_op is self._mpi_ops[0] and own.dtype.char in "fd":
            return np.add  # faster than MPICH's sum, with the same result

        def combine(arrived: Array, mine: Array, result: Array) -> None:
            if result is not mine:
                result[...] = mine
            mpi_op.Reduce_local(arrived, result)

        return combine


class PartExchange:
    """Runs Ops that have parts: each part is a message from array to array.

    Args:
        comm: The communicator of the group.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._rank, self._size = comm.rank, comm.size
        self._error = MPI.Exception

    def run(self, op: Op, requests: list[MPI.Request]) -> None:
        """Collective. Run an Op.

        Args:
            op: The Op.
            requests: Receives the pending requests. After an exception it has the requests that may
                be pending.
        """
        if op.name == "all_gather":
            self._gather_in_ring(op, requests)
        else:
            self.start(op, requests)
            self._wait_for(requests)

    def start(self, op: Op, requests: list[MPI.Request]) -> None:
        """Collective. Start an Op and append its requests."""
        # Each rank begins with another peer. The own part is copied while peers fetch theirs.
        comm, rank, size = self._comm, self._rank, self._size
        for n in range(1, size):
            source = (rank - n) % size
            if source in op.recv_parts:
                _start(requests, comm.Irecv, op.recv_parts[source], source)
        for n in range(1, size):
            target = (rank + n) % size
            if target in op.send_parts:
                _start(requests, comm.Isend, op.send_parts[target], target)
        _copy_own_part(op, rank)

    def _gather_in_ring(self, op: Op, requests: list[MPI.Request]) -> None:
        # In a ring each part crosses the network between two nodes once, however many ranks they
        # have (Thakur, Rabenseifner and Gropp 2005, section 4.1).
        rank, size = self._rank, self._size
        left, right = (rank - 1) % size, (rank + 1) % size
        given = op.send_parts[rank]
        is_copied = size == 1 or given.nbytes >= _MIN_SENT_AS_COPY_BYTES
        if is_copied:
            _copy_own_part(op, rank)
            given = op.recv_parts[rank]
        for step in range(1, size):
            taken = op.recv_parts[(rank - step) % size]
            _start(requests, self._comm.Irecv, taken, left)
            _start(requests, self._comm.Isend, given, right)
            if not is_copied:  # while the first parts are in transfer
                _copy_own_part(op, rank)
                is_copied = True
            self._wait_for(requests)
            given = taken

    def _wait_for(self, requests: list[MPI.Request]) -> None:
        """Wait for all requests, also after one has failed, and raise the first error."""
        failure = None
        while requests:
            try:
                requests[-1].Wait()
            except self._error as error:
                failure = failure or error
            requests.pop()
        if failure is not None:
            raise failure


def _start(
    requests: list[MPI.Request], call: Callable[..., MPI.Request], part: Array, peer: int
) -> None:
    """Start the messages of a part. An error leaves the started ones in the list."""
    for segment in split_counts(part):
        requests.append(call(segment, peer, _PART_TAG))  # noqa: PERF401


def _copy_own_part(op: Op, rank: int) -> None:
    """Copy the part that a rank sends to itself."""
    given, taken = op.send_parts.get(rank), op.recv_parts.get(rank)
    if given is None or taken is None or given is taken:
        return
    if given.dtype != taken.dtype:  # one of them moves as bytes: MPI has no type for its memory
        given, taken = (array.reshape(-1).view(np.uint8) for array in (given, taken))
    if given.shape == taken.shape:
        taken[...] = given
    else:
        taken.reshape(-1)[...] = given.reshape(-1)
