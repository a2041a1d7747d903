"""The backend that runs collectives through NCCL, for ranks that have a GPU each."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, cast

from mpidist.errors import DistBackendError
from mpidist.gpu import make_current, on_device
from mpidist.gpu.cupy_api import cuda_errors
from mpidist.gpu.kernels import LOGICAL, as_numbers, divided, is_half
from mpidist.gpu.nccl import connect, nccl_errors, nccl_module, unique_id
from mpidist.gpu.streams import is_done, new_stream, ordered_with, record_event
from mpidist.group.gpu_operation import GpuOp
from mpidist.group.operation import Op
from mpidist.mpi import Backoff, PendingOps, watched
from mpidist.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI

# AVG is a sum that is divided, as on the host. NCCL's own average scales before it adds.
_OPS = {"AVG": "SUM", "PRODUCT": "PROD"}
_PERIOD_S = 0.1


class NcclBackend:
    """Runs collectives of arrays on GPUs through NCCL; see :class:`mpidist.group.backend.Backend`.

    Collective. ``ProcessGroup._gpu_op`` makes a GpuOp, the submission calls ``run`` or ``start``,
    and both queue the operation on a stream of the group. This stream waits for the streams of the
    arrays, and after the operation the streams of the arrays wait for this one. The host waits for
    the operation only if the group has a time limit. For compared calls it waits for the other
    ranks.

    An operation stays registered as pending until it has ended on the device. If it does not end,
    the watchdog of the rank reports it. The watchdog ends the job if another member has left, or
    after ``MPIDIST_STALL_ABORT_S``.

    A thread removes operations that have ended, and aborts all operations if NCCL has failed on the
    device. After an abort the streams go on with wrong values, so an error of the thread ends the
    job.

    Args:
        comm: The communicator of the group.
        device: Index of this rank's GPU.
        waits: The registry of pending operations, for the watchdog of the rank.
        pending: The registry of works that have not ended, by id.
        mark_broken: Called with the name and the error of an operation that breaks the group.

    Raises:
        DistBackendError: NCCL or CUDA failed.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        device: int,
        waits: PendingOps,
        pending: MutableMapping[int, Work],
        mark_broken: Callable[[str, BaseException], None],
    ) -> None:
        self._nccl = nccl_module()
        self._rank, self._size, self._device = comm.rank, comm.size, device
        self._current = waits.current
        self._pending = pending
        self._mark_broken = mark_broken
        self._where = f"NCCL failed on rank {comm.rank} of {comm.size}, GPU {device}"
        self._stream = new_stream(device)
        with watched("making a communicator of NCCL", comm.Get_group()):
            unique: bytes | Exception = b""
            try:
                unique = unique_id() if comm.rank == 0 else b""
            except Exception as error:  # every rank raises it
                unique = error
            unique = comm.bcast(unique)
            if isinstance(unique, Exception):
                raise unique
            with on_device(device, "making a communicator of NCCL"):
                self._communicator = connect(comm.size, unique, comm.rank, self._where)
        self._lock = threading.Lock()  # of calls of NCCL
        self._aborted = False
        self._failure: DistBackendError | None = None
        self._queued: deque[tuple[Op, Any]] = deque()  # operations, and events behind them
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpidist-nccl", daemon=True)
        self._thread.start()

    has_queued = False  # NCCL keeps the order

    def run(self, op: Op) -> None:
        """Queue an operation; see :meth:`mpidist.group.backend.Backend.run`."""
        self._queue(cast("GpuOp", op))

    def start(self, op: Op) -> Work:
        """Queue an operation; see :meth:`mpidist.group.backend.Backend.start`."""
        work = _EventWork(cast("GpuOp", op), self._queue(cast("GpuOp", op)), self)
        self._pending[id(work)] = work
        return work

    def free(self) -> None:
        """Collective. Wait until all operations have ended, and destroy the communicator.

        Raises:
            DistBackendError: An operation has failed, or was aborted.
        """
        self._end_thread()
        backoff = Backoff(spins=1000, longest_s=1e-4)
        try:
            while self._queued and self._failure is None:
                self._observe()
                backoff.pause()
            self.check()
        except BaseException:
            self._abort()
            raise
        with on_device(self._device, "closing NCCL"):
            self._communicator.destroy()

    def abandon(self) -> None:
        """Abort all operations, if other members cannot join :meth:`free`."""
        self._end_thread()
        self._abort()

    def check(self) -> None:
        """Raise DistBackendError if an operation has failed or was aborted."""
        if self._failure is not None:
            raise DistBackendError(str(self._failure)) from self._failure

    def forget(self, work: Work) -> None:
        """Remove a work that has ended from the pending works."""
        self._pending.pop(id(work), None)

    # Inside

    def _queue(self, op: GpuOp) -> Any:
        """Queue an operation. Return an event behind it."""
        if not max(op.output.nbytes, op.input.nbytes):
            return None
        text, marker = op.describe(), op.without_arrays()
        self._current[id(marker)] = marker  # from now on, because the call may block
        try:
            with self._lock, on_device(self._device, text):
                self.check()
                self._communicator.check_async_error()
                with ordered_with(self._stream, [op.input.stream, op.output.stream]):
                    self._call(op)
                op.unpack()
                # A copy into a strided output belongs to the operation, too.
                event = record_event(op.output.stream)
        except BaseException as error:  # the other ranks would wait for this operation for ever
            del self._current[id(marker)]
            failed = self._fail(f"{text}: {error!r}")
            self._mark_broken(op.name, error)
            if isinstance(error, nccl_errors(self._nccl)):
                raise failed from error
            raise
        self._queued.append((marker, event))
        return event

    def _fail(self, reason: str) -> DistBackendError:
        """Refuse all operations from now on. Return the error of the first failure."""
        self._failure = self._failure or DistBackendError(f"{self._where}: {reason}")
        return self._failure

    def _watch(self) -> None:
        make_current(self._device)
        while not self._stop.wait(_PERIOD_S):
            self._observe()

    def _observe(self) -> None:
        """Remove the operations that have ended. Raise an error if NCCL has failed."""
        try:
            while self._queued and is_done(self._queued[0][1]):
                self._current.pop(id(self._queued.popleft()[0]))
        except cuda_errors() as error:  # the caller's next call of CUDA raises it, too
            self._forget_queued()
            self._fail(f"an operation or earlier work on its streams: {error}")
        if self._failure is not None or not self._lock.acquire(blocking=False):
            return  # a call of NCCL may be under way
        try:
            self._communicator.check_async_error()
        except Exception as error:
            failed = self._fail(str(error))
        else:
            return
        finally:
            self._lock.release()
        self._abort()
        raise failed

    def _forget_queued(self) -> None:
        while self._queued:
            self._current.pop(id(self._queued.popleft()[0]))

    def _end_thread(self) -> None:
        self._stop.set()
        self._thread.join()

    def _abort(self) -> None:
        self._fail("the group was closed before its operations had ended")
        self._forget_queued()
        with self._lock:
            if not self._aborted:
                self._aborted = True
                self._communicator.abort()

    def _call(self, op: GpuOp) -> None:
        dtype, stream = op.output.dtype, self._stream.ptr
        nccl, comm, byte = self._nccl, self._communicator, self._nccl.NCCL_UINT8
        source, result = op.source, op.result
        read, write = source.data.ptr, result.data.ptr
        match op.name:
            case "broadcast":
                comm.broadcast(read, write, source.nbytes, byte, op.root, stream)
                return
            case "all_gather_into_tensor":
                comm.allGather(read, write, source.nbytes, byte, stream)
                return
            case "all_to_all_single":
                self._exchange(read, write, source.nbytes // self._size)
                return
        kind = getattr(nccl, f"NCCL_{source.dtype.name.upper()}")
        name = op.op.name
        if dtype.char == "?":
            name = LOGICAL.get(name, name)
        code = getattr(nccl, f"NCCL_{_OPS.get(name, name)}")
        match op.name:
            case "all_reduce":
                comm.allReduce(read, write, source.size, kind, code, stream)
            case "reduce":
                comm.reduce(read, write, source.size, kind, code, op.root, stream)
            case "reduce_scatter_tensor":
                comm.reduceScatter(read, write, result.size, kind, code, stream)
        count = self._size if op.op.name == "AVG" else 1
        if (is_half(dtype) or count > 1) and op.root in (-1, self._rank):
            divided(result, as_numbers(op.packed_output, dtype), dtype, count)

    def _exchange(self, source: int, target: int, part: int) -> None:
        """Send each rank its part, in bytes; NCCL has no all-to-all."""
        byte, stream = self._nccl.NCCL_UINT8, self._stream.ptr
        self._nccl.groupStart()
        try:
            for peer in range(self._size):
                place = peer * part
                self._communicator.send(source + place, part, byte, peer, stream)
                self._communicator.recv(target + place, part, byte, peer, stream)
        finally:
            self._nccl.groupEnd()


class _EventWork(Work):
    """A Work that ends with an event of CUDA.

    Args:
        op: The operation.
        event: The event behind it; None if there was nothing to do.
        backend: The backend that has queued it.
    """

    def __init__(self, op: GpuOp, event: Any, backend: NcclBackend) -> None:
        super().__init__(op.name, self._poll)
        self._op: GpuOp | None = op  # keeps the arrays
        self._cuda_event = event
        self._backend = backend

    def is_completed(self) -> bool:
        """Return whether the operation has ended on the device; never blocks."""
        if not self._done:
            try:
                self._backend.check()
                if self._cuda_event is not None and not is_done(self._cuda_event):
                    return False
            except Exception as error:  # the work ends with it
                self._end(error)
            else:
                self._end()
        return self._done

    def _poll(self, _: Work, deadline: float) -> None:
        backoff = Backoff(spins=1000, longest_s=1e-4)
        while not self.is_completed() and time.monotonic() < deadline:
            backoff.pause()

    def _end(self, error: Exception | None = None) -> None:
        self._backend.forget(self)
        op = self._op
        self.complete(op.outputs if op is not None else None, error)
        self._op = None
