"""The backend that runs collectives through NCCL, for ranks that have a GPU each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, cast

from mpidist.errors import DistBackendError
from mpidist.gpu import cupy, on_device
from mpidist.gpu.nccl import connect, nccl_errors, nccl_module, unique_id
from mpidist.gpu.reductions import as_numbers, divided, is_half, widened
from mpidist.gpu.stream_watchdog import StreamWatchdog
from mpidist.gpu.streams import CommStream, is_done, record_event
from mpidist.group.gpu_operation import GpuOp
from mpidist.group.operation import Op
from mpidist.mpi import Backoff, PendingOps, watched
from mpidist.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI

_TYPES = {
    "i1": "NCCL_INT8",
    "u1": "NCCL_UINT8",
    "i4": "NCCL_INT32",
    "u4": "NCCL_UINT32",
    "i8": "NCCL_INT64",
    "u8": "NCCL_UINT64",
    "f4": "NCCL_FLOAT32",
    "f8": "NCCL_FLOAT64",
}
# AVG is a sum that is divided, as on the host. NCCL's own average scales before it adds.
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_LOGICAL = {"SUM": "MAX", "PRODUCT": "MIN"}
_LOCK_WAIT_S = 0.1  # for a call under way, before the communicator is aborted


class NcclBackend:
    """Runs collectives of arrays on GPUs through NCCL; see :class:`mpidist.group.backend.Backend`.

    Collective. The steps of an operation: ``ProcessGroup._gpu_op`` makes a GpuOp, the submission
    calls ``run`` or ``start``, and both queue it on a stream of the group. That stream waits for
    the streams of the arrays, and after the operation they wait for it. The host does not wait.

    The operations stay registered as pending until they have ended on the device. So the watchdog
    of the rank ends the job if another member has left. A thread aborts an operation that has not
    ended after ``MPIDIST_STALL_ABORT_S``.

    Args:
        comm: The communicator of the group.
        device: Index of this rank's GPU.
        waits: The registry of pending operations, for the watchdog of the rank.
        pending: The registry of works that have not ended, by id.
        tear: Called with an operation and its error if the group cannot go on.

    Raises:
        DeadlineExceededError: Not all ranks came within ``MPIDIST_STALL_ABORT_S``.
        DistBackendError: NCCL or CUDA failed.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        device: int,
        waits: PendingOps,
        pending: MutableMapping[int, Work],
        tear: Callable[[str, BaseException], None],
    ) -> None:
        self.error: type[Exception] = DistBackendError
        self._nccl = nccl_module()
        self._rank, self._size, self._device = comm.rank, comm.size, device
        self._pending = pending
        self._tear = tear
        where = f"NCCL, rank {comm.rank} of {comm.size}, GPU {device}"
        self._stream = CommStream(device)
        with watched("making a communicator of NCCL", comm.Get_group()):
            unique = comm.bcast(_unique_id_or_error() if comm.rank == 0 else None)
            if isinstance(unique, Exception):
                raise unique
            self._communicator = connect(comm.size, unique, comm.rank, device, where)
        self._watchdog = StreamWatchdog(
            where, device, self._check_communicator, self._abort, waits.current
        )
        self._lock = threading.Lock()  # of calls of NCCL
        self._ending = threading.Lock()  # of ``_ended`` and check_async_error()
        self._ended = False

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
        try:
            self._watchdog.finish()
        except DistBackendError:
            self._abort()
            raise
        else:
            with self._watchdog.calling("closing"), on_device(self._device, "closing NCCL"):
                with self._ending:
                    self._ended = True
                self._communicator.destroy()
        finally:
            self._watchdog.stop()

    def abandon(self) -> None:
        """Abort all operations, if other members cannot join :meth:`free`."""
        self._abort()
        self._watchdog.stop()

    def check(self) -> None:
        """Raise DistBackendError if an operation has failed or was aborted."""
        self._watchdog.check()

    def forget(self, work: Work) -> None:
        """Remove a work that has ended from the pending works."""
        self._pending.pop(id(work), None)

    # Inside

    def _queue(self, op: GpuOp) -> Any:
        """Queue an operation. Return an event behind it."""
        if not max(op.output.nbytes, op.input.nbytes):
            return None
        text = op.describe()
        streams = [op.input.stream, op.output.stream]
        try:
            with self._lock, on_device(self._device, text), self._watchdog.calling(text):
                self._communicator.check_async_error()
                source, output = op.packed()
                with self._stream.ordered_with(streams):
                    self._call(op, source, output)
                op.unpack(output)
                # A copy into a strided output belongs to the operation, too.
                event = record_event(op.output.stream)
        except BaseException as error:  # the other ranks would wait for this operation for ever
            failed = self._watchdog.fail(f"{text} has failed: {error!r}")
            self._tear(op.name, error)
            if isinstance(error, nccl_errors(self._nccl)):
                raise failed from error
            raise
        self._watchdog.append(text, event, op.without_arrays())
        return event

    def _call(self, op: GpuOp, source: Any, output: Any) -> None:
        """Call NCCL.

        Args:
            op: The operation.
            source: The input, see :meth:`mpidist.gpu.DeviceArray.packed`.
            output: The output likewise.
        """
        dtype, stream = op.output.dtype, self._stream.stream.ptr
        nccl, comm, byte = self._nccl, self._communicator, self._nccl.NCCL_UINT8
        read, write = source.data.ptr, output.data.ptr
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
        # float16 and bfloat16 are reduced in float32.
        given, taken = as_numbers(source, dtype), as_numbers(output, dtype)
        if is_half(dtype):
            given = widened(given, dtype)
            into = given if source is output else cupy().empty(taken.shape, given.dtype)
        else:
            into = taken
        kind = getattr(nccl, _TYPES[f"{given.dtype.kind}{given.dtype.itemsize}"])
        name = op.op.name
        if dtype.char == "?":
            name = _LOGICAL.get(name, name)
        code = getattr(nccl, f"NCCL_{_OPS[name]}")
        read, write = given.data.ptr, into.data.ptr
        match op.name:
            case "all_reduce":
                comm.allReduce(read, write, given.size, kind, code, stream)
            case "reduce":
                comm.reduce(read, write, given.size, kind, code, op.root, stream)
            case "reduce_scatter_tensor":
                comm.reduceScatter(read, write, into.size, kind, code, stream)
        count = self._size if op.op.name == "AVG" else 1
        if (is_half(dtype) or count > 1) and op.root in (-1, self._rank):
            divided(into, taken, dtype, count)

    def _exchange(self, source: int, target: int, part: int) -> None:
        """Send each rank its part, in bytes; NCCL has no all-to-all."""
        own = self._rank * part
        self._stream.copy(target + own, source + own, part)
        if self._size == 1:
            return
        byte, stream = self._nccl.NCCL_UINT8, self._stream.stream.ptr
        self._nccl.groupStart()
        try:
            for peer in range(self._size):
                if peer != self._rank:
                    place = peer * part
                    self._communicator.send(source + place, part, byte, peer, stream)
                    self._communicator.recv(target + place, part, byte, peer, stream)
        finally:
            self._nccl.groupEnd()

    def _check_communicator(self) -> None:
        with self._ending:
            if not self._ended:
                self._communicator.check_async_error()

    def _abort(self) -> None:
        # A call under way holds the lock and may need the abort to end. New calls must not begin.
        locked = self._lock.acquire(timeout=_LOCK_WAIT_S)
        try:
            with self._ending:
                ended, self._ended = self._ended, True
            if not ended:
                self._communicator.abort()
        finally:
            if locked:
                self._lock.release()


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


def _unique_id_or_error() -> bytes | Exception:
    """Return the id, or the error that every rank is to raise."""
    try:
        return unique_id()
    except Exception as error:
        return error
