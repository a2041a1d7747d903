"""The backend that gives operations to MPI, on host memory."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.config import config
from mpidist.errors import DistBackendError
from mpidist.group.mpi_pipelines import PIPELINED, PartExchange, ReductionPipeline
from mpidist.group.operation import LARGEST_COUNT, RESERVED_TAGS, Op, split_op
from mpidist.mpi import DETAIL_HINT, Backoff, PendingOps, SharedCoreBackoff, world
from mpidist.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI

# Keys of waits in the registry, a new one for each wait: several threads may wait for one Work.
# Negative, because blocking operations use their ids.
_wait_keys = itertools.count(-1, -1)
_FREE_TAG = RESERVED_TAGS[971]
_FREE_S = 5.0  # seconds in which the members agree about the end of a communicator
# Messages about the end of communicators that MPI is still sending or receiving.
_ending: list[tuple[MPI.Request, np.ndarray[Any, Any]]] = []
_QUICK_TESTS = 50  # tests of a request without a pause: some 10 us
# Pauses after the quick tests that yield the core: some 0.1 s. Later pauses sleep. MPI moves data
# only while a request is tested: with 5000 yields, Open MPI's reduce of 64 MiB took more than 7 s,
# and with these 0.1 s.
_YIELDS = 100_000
# An asynchronous reduce goes to MPI in pieces. 64 MiB in one piece take twice as long on four ranks
# (Open MPI 124 ms for 59, gloo 75), because MPI allocates an array of its size.
_REDUCED_BYTES = 4 << 20
_NEIGHBORS_TAG = RESERVED_TAGS[1]  # the first of one tag for each side


class MpiBackend:
    """Runs operations through MPI on host memory; see :class:`mpidist.group.backend.Backend`.

    Args:
        comm: The communicator of the group.
        waits: The registry of operations in which threads are blocked.
        pending: The registry of works that have not ended, by id. It keeps the arrays that MPI
            uses, also those of an operation that failed after some of its requests had started.
    """

    def __init__(
        self, comm: MPI.Intracomm, waits: PendingOps, pending: MutableMapping[int, Work]
    ) -> None:
        from mpi4py import MPI

        self.error: type[Exception] = MPI.Exception
        self._new_status = MPI.Status
        self._comm = comm
        self._waits = waits
        self._pending = pending
        self._parts = PartExchange(comm)
        self._run = _calls(lambda name: getattr(comm, name))
        self._run["recv"] = self._recv
        pipeline = ReductionPipeline(comm, _constants()[0])
        self._run |= {name: pipeline.for_large(self._run[name]) for name in PIPELINED}
        self._start = _calls(lambda name: getattr(comm, f"I{name.lower()}"))

    def run(self, op: Op) -> None:
        """Run an operation; see :meth:`mpidist.group.backend.Backend.run`."""
        run, recv = self._run[op.name], op.recv
        if recv is not None and recv.size <= LARGEST_COUNT:  # the usual case
            run(op)
            return
        if recv is None and (op.send_parts or op.recv_parts):
            self._run_parts(op)
            return
        if op.count() <= LARGEST_COUNT:
            run(op)
            return
        segments = split_op(op)
        op.halfway = True
        for segment in segments:
            segment.root = op.root  # of a receive from any peer, the sender of the first segment
            run(segment)
            op.root = segment.root
        op.halfway = False

    def start(self, op: Op) -> RequestWork:
        """Start an operation; see :meth:`mpidist.group.backend.Backend.start`."""
        requests: list[MPI.Request] = []
        try:
            self._start_requests(op, requests)
        except BaseException as error:
            self._keep_started(op, requests, error)
            raise
        return self._work(op, requests)

    def run_within(self, op: Op, deadline: float) -> Work | None:
        """Run an operation by polling. Return its Work if it is still pending at the deadline.

        A Work from the start would double the time of a small operation.

        Args:
            op: The operation.
            deadline: A time of ``time.monotonic()``.
        """
        requests: list[MPI.Request] = []
        status = self._new_status() if op.name == "recv" else None
        tests, backoff = 0, None
        try:
            self._start_requests(op, requests)
            while requests:
                if requests[-1].Test(status):
                    requests.pop()
                elif tests < _QUICK_TESTS:
                    tests += 1
                elif backoff is None:
                    backoff = _new_backoff()
                elif time.monotonic() < deadline:
                    backoff.pause()
                else:
                    return self._work(op, requests)
        except self.error as error:
            self._keep_started(op, requests[:-1], error)
            raise
        except BaseException as error:
            self._keep_started(op, requests, error)
            raise
        if status is not None:
            op.root = status.source
        return None

    def free(self, *, clean: bool = True, calls: tuple[int, int] = (0, 0)) -> int | None:
        """Collective. Release the communicator, if it is clean on all members.

        Open MPI gives the context id of a freed communicator to the next one, which would take late
        messages for its own and lose others. So no member frees a communicator if any member may
        have such messages. The members agree by a dissemination barrier (Hensgen, Finkel and
        Manber, 1988). A member that is not clean does not wait for others, and others wait for a
        few seconds.

        Args:
            clean: True if this member has no pending operation, and expects no late message.
            calls: Number and checksum of the calls of this member, equal on all members.

        Returns:
            The group rank of a member whose calls differ, if this member has met one.
        """
        comm, distance, different = self._comm, 1, None
        deadline = time.monotonic() + _FREE_S
        while distance < comm.size:
            told = np.array([clean, *calls], np.int64)
            _ending.append((comm.Isend(told, (comm.rank + distance) % comm.size, _FREE_TAG), told))
            if clean:
                heard, source = np.zeros(3, np.int64), (comm.rank - distance) % comm.size
                request, backoff = comm.Irecv(heard, source, _FREE_TAG), Backoff()
                while not request.Test() and time.monotonic() < deadline:
                    backoff.pause()
                if heard[0] and tuple(heard[1:]) != calls:
                    different = source
                clean = bool(heard[0]) and different is None
                _ending.append((request, heard))
            distance *= 2
        _ending[:] = [entry for entry in _ending if not entry[0].Test()]
        if clean:
            comm.Free()
        return different

    def _run_parts(self, op: Op) -> None:
        requests: list[MPI.Request] = []
        op.halfway = True
        try:
            self._parts.run(op, requests)
        except BaseException as error:
            self._keep_started(op, requests, error)
            raise
        op.halfway = False

    def _keep_started(self, op: Op, requests: list[MPI.Request], error: BaseException) -> None:
        """Register the started requests of a failed Op as pending, to keep their arrays alive."""
        if requests:
            op.halfway = True
            self._work(op, requests, error)

    def _work(
        self, op: Op, requests: list[MPI.Request], failure: BaseException | None = None
    ) -> RequestWork:
        status = self._new_status() if op.name == "recv" else None
        work = RequestWork(op, requests, self._waits, self._pending, self.error, status, failure)
        self._pending[id(work)] = work
        return work

    def _start_requests(self, op: Op, requests: list[MPI.Request]) -> None:
        """Start an Op. Append each request when it has started, so that an error loses none."""
        recv = op.recv
        if op.name == "neighbor_all_to_all":
            self._start_neighbors(op, requests)
            return
        most = LARGEST_COUNT
        if op.name == "reduce":
            array = op.send if recv is None else recv
            assert array is not None
            most = _REDUCED_BYTES // array.itemsize
        if recv is not None and recv.size <= most:  # the usual case
            requests.append(self._start[op.name](op))
            return
        if op.send_parts or op.recv_parts:
            self._parts.start(op, requests)
            return
        segments = split_op(op, most)
        if len(segments) > 1:
            if op.name == "recv" and op.root < 0:
                raise ValueError(
                    f"{op.describe()} moves more than {LARGEST_COUNT} elements, and segments of "
                    "several senders might mix: name the sender, or receive without async_op and "
                    "a time limit"
                )
            op.segments = segments  # not all of MPI's requests keep their arrays
        for segment in segments:
            requests.append(self._start[op.name](segment))  # noqa: PERF401

    def _start_neighbors(self, op: Op, requests: list[MPI.Request]) -> None:
        # Open MPI's Ineighbor_alltoall swaps the parts of a rank that is both neighbors.
        assert op.send is not None
        assert op.recv is not None
        grid = cast("MPI.Cartcomm", self._comm)
        sides = [rank for dimension in range(grid.ndim) for rank in grid.Shift(dimension, 1)]
        given, taken = (buffer.reshape(len(sides), -1) for buffer in (op.send, op.recv))
        for side, rank in enumerate(sides):
            requests.append(grid.Irecv(taken[side], rank, _NEIGHBORS_TAG + side))
        for side, rank in enumerate(sides):
            # A message sent on one side arrives on the opposite side of the peer.
            requests.append(grid.Isend(given[side], rank, _NEIGHBORS_TAG + (side ^ 1)))

    def _recv(self, op: Op) -> None:
        if op.root >= 0:
            self._comm.Recv(op.recv, op.root, op.tag)
            return
        from mpi4py import MPI

        status = self._new_status()
        self._comm.Recv(op.recv, MPI.ANY_SOURCE, op.tag, status)
        op.root = status.source


class RequestWork(Work):
    """A Work that ends with MPI's requests.

    Args:
        op: The operation.
        requests: MPI's requests for it.
        waits: The registry of operations in which threads are blocked.
        pending: The registry of works that have not ended; the Work removes itself.
        mpi_error: The class of MPI's errors.
        status: Receives the sender of a message, for a receive.
        failure: An earlier error of the operation; the Work ends with it.
    """

    _backoff: Backoff | None = None  # of all waits for this Work, on shared cores

    def __init__(
        self,
        op: Op,
        requests: list[MPI.Request],
        waits: PendingOps,
        pending: MutableMapping[int, Work],
        mpi_error: type[Exception],
        status: MPI.Status | None = None,
        failure: BaseException | None = None,
    ) -> None:
        super().__init__(op.name, self._drive_requests)
        self._op: Op | None = op  # None after the end: the caller may keep this Work
        self._requests = requests
        self._status = status
        self._waits = waits
        self._pending = pending
        self._mpi_error = mpi_error
        self._testing = threading.Lock()
        self._failure = failure

    def is_completed(self) -> bool:
        """Test MPI's requests. Return whether the operation has ended."""
        if not self._done and self._testing.acquire(False):  # by keyword it takes twice as long
            try:
                self._advance(wait=False)
            finally:
                self._testing.release()
        return self._done

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the watchdog, in the block, that a thread waits for the operation."""
        key = self._add_wait()
        try:
            yield
        finally:
            self._waits.current.pop(key, None)

    def _add_wait(self) -> int:
        """Register the wait of this thread, unless the operation has ended. Return its key."""
        key, op = next(_wait_keys), self._op
        if op is not None:
            self._waits.current[key] = op
        return key

    def _drive_requests(self, work: Work, deadline: float) -> None:
        key = self._add_wait()
        try:
            if deadline == float("inf"):
                with self._testing:
                    self._advance(wait=True)
            else:
                backoff = self._backoff or _new_backoff()
                if isinstance(backoff, SharedCoreBackoff):
                    # The thread of the futures waits in slices that are shorter than the yields.
                    self._backoff = backoff
                while not self.is_completed() and time.monotonic() < deadline:
                    backoff.pause()
        finally:
            self._waits.current.pop(key, None)

    def _advance(self, *, wait: bool) -> None:
        """Test the requests, or wait for them, and end the Work after the last."""
        op = self._op
        if op is None:  # another thread has ended it meanwhile
            return
        while self._requests:
            try:
                if wait:
                    self._requests[-1].Wait(self._status)
                elif not self._requests[-1].Test(self._status):
                    return
            except self._mpi_error as error:  # MPI may still use the arrays of the other requests
                self._failure = self._failure or error
            self._requests.pop()
        if self._failure is not None:
            self._end(error=backend_error(op, self._failure))
            return
        try:
            if op.finish is not None:
                op.finish()
        except Exception as error:  # a difference between ranks, a read-only array, or no memory
            traceback.clear_frames(error.__traceback__)  # the stored error must not keep arrays
            self._end(error=error)
            return
        except BaseException as error:  # a second call of finish would divide a mean twice
            self._end(error=backend_error(op, error))
            raise
        if op.outputs is None and self._status is not None:
            self._end(op.group.ranks[self._status.source])
        else:
            self._end(op.outputs)

    def _end(
        self, value: Sequence[Any] | int | None = None, error: BaseException | None = None
    ) -> None:
        self._pending.pop(id(self), None)
        self._op = None
        self.complete(value, error)


def _new_backoff() -> Backoff:
    return SharedCoreBackoff() if _shares_cores() else Backoff(_YIELDS)


@cache
def _shares_cores() -> bool:
    """Return whether this node has more ranks than cores."""
    here = world()
    return here.nodes.count(here.nodes[here.rank]) > (os.cpu_count() or 1)


def backend_error(op: Op, error: BaseException) -> DistBackendError:
    """Return a DistBackendError for the exception that ended an operation."""
    group = op.group
    text = f"{op.describe()} failed on group rank {group.rank} of {group.size}: "
    text += in_one_line(error)
    if op.sequence and config.debug != "detail":
        text += DETAIL_HINT
    elif not op.sequence and "truncat" in text:
        text += "; the message is longer than the array that receives it"
    return DistBackendError(text)


def in_one_line(error: BaseException) -> str:
    """Return the text of an error in one line; of MPICH's error stack, its first and last entry."""
    lines = str(error).strip().splitlines() or [repr(error)]
    if len(lines) == 1:
        return lines[0]
    cause = re.sub(r"^\w+\(.*?\)\.*: ", "", lines[-1].strip())
    return f"{lines[0].removesuffix(', error stack:')}: {cause}"


def _calls(method: Callable[[str], Callable[..., Any]]) -> dict[str, Callable[[Op], Any]]:
    """Return, for each name of an operation, the function that makes the MPI call of an Op.

    Args:
        method: Returns the communicator's method of a name, blocking or not.
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
        # Only communicators with a topology have these two.
        "neighbor_all_gather": lambda o: method("Neighbor_allgather")(o.send, o.recv),
        "neighbor_all_to_all": lambda o: method("Neighbor_alltoall")(o.send, o.recv),
    }


@cache
def _constants() -> tuple[list[MPI.Op], Any, int]:
    """Return the MPI_Ops, indexed by MpiReduction, then MPI_IN_PLACE and MPI_ANY_SOURCE."""
    from mpi4py import MPI

    ops = [MPI.SUM, MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX, MPI.BAND, MPI.BOR, MPI.BXOR]
    ops += [MPI.SUM, MPI.Op.Create(_add_wrapping, commute=True)]  # AVG and PREMUL_SUM are sums
    return ops, MPI.IN_PLACE, MPI.ANY_SOURCE


def _add_wrapping(source: Any, target: Any, datatype: MPI.Datatype) -> None:
    """Add 8- or 16-bit integers modulo 2^n, as a user-defined operation (MPI 4.1, 6.9.5).

    Signed and unsigned integers have the same sum, bit by bit.

    mpi4py cannot pass an exception through MPI, so every exception here ends the job, also that of
    a signal handler.
    """
    dtype = np.uint8 if datatype.Get_size() == 1 else np.uint16
    total = np.frombuffer(target, dtype)
    np.add(total, np.frombuffer(source, dtype), out=total)
