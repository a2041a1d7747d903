"""The backend that runs collectives through CUDA IPC, for ranks of one host that may share a GPU.

Each rank allocates one exchange buffer on its GPU, which the others open once (CUDA C++ Programming
Guide, "Interprocess Communication"). One operation takes these steps:

1. ``ProcessGroup._gpu_op`` makes a GpuOp, and the submission calls ``run`` or ``start``.
2. The members tell each other whether all arrays are on their GPUs. If not, all stage them.
3. For each chunk, a rank copies its data into its buffer, passes a barrier on the host, and reads
   from the buffers of the others. all_reduce reduces one part of the chunk on each rank, passes a
   second barrier, and then reads the reduced parts.
4. A last barrier tells all ranks whether all have succeeded.

So an array may lie in memory of any kind: of a pool, managed, or strided. The host waits for copies
and kernels before each barrier. Interprocess events would avoid this wait, but a kernel that never
ends would then hang other ranks silently.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.errors import DistBackendError
from mpidist.gpu import cupy, make_current, on_device, record_event, synchronize, wait_for
from mpidist.gpu.kernels import combine, numbers_at
from mpidist.gpu.streams import new_stream, use_stream
from mpidist.group.gpu_operation import GpuOp
from mpidist.group.mpi_backend import MpiBackend, backend_error
from mpidist.group.operation import Op
from mpidist.mpi import PendingOps, watched, world
from mpidist.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("mpidist")

CHUNK_BYTES = 16 << 20
"""Size of one chunk. The exchange buffer has two halves, which are used in turn."""
_ALIGNED = 256  # bytes; a multiple of the size of every element

Steps = Iterator[None]
"""The steps of an operation on one rank, with a barrier wherever it yields."""


class IpcBackend:
    """Runs collectives of arrays on GPUs; see :class:`mpidist.group.backend.Backend`.

    Collective. Asynchronous operations run on a thread, in order. A communicator of its own keeps
    their messages apart from the other operations of the group.

    Args:
        comm: The communicator of the group.
        device: Index of this rank's GPU.
        waits: The registry of operations in which threads are blocked.
        pending: The registry of works that have not ended, by id.
        mark_broken: Called with the name and the error of an operation that breaks the group.

    Attributes:
        problem: The reason why all operations are staged, or "".
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        device: int,
        waits: PendingOps,
        pending: MutableMapping[int, Work],
        mark_broken: Callable[[str, BaseException], None],
    ) -> None:
        from mpi4py import MPI

        self.error: type[Exception] = MPI.Exception
        self._rank, self._size, self._device = comm.rank, comm.size, device
        self._waits, self._pending, self._mark_broken = waits, pending, mark_broken
        self._stream: Any = None
        self._memory: Any = None
        self._buffers: list[int] = []  # addresses in this process, by group rank
        self._opened: list[int] = []
        self._half = 0
        self._room = (
            CHUNK_BYTES // comm.size // _ALIGNED * _ALIGNED
        )  # of each rank's part in a half
        self._failure: BaseException | None = None
        self._queue: queue.Queue[tuple[GpuOp, Work] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        with watched("opening exchange buffers on GPUs", comm.Get_group()):
            self._comm = comm.Dup()
            self.problem = self._open_buffers()
        self._host = MpiBackend(self._comm, waits, pending)
        if self.problem:
            logger.warning("CUDA IPC cannot be used, arrays on GPUs are staged: %s", self.problem)

    def run(self, op: Op) -> None:
        """Run an operation; see :meth:`mpidist.group.backend.Backend.run`."""
        self._carry_out(cast("GpuOp", op))

    @property
    def has_queued(self) -> bool:
        """True while the thread runs operations, so that later ones must be started, not run."""
        return bool(self._queue.unfinished_tasks)

    def start(self, op: Op) -> Work:
        """Queue an operation for the thread; see :meth:`mpidist.group.backend.Backend.start`."""
        work = Work(op.name)
        self._pending[id(work)] = work
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpidist-ipc", daemon=True)
            self._thread.start()
            world().shutdown.before_leave.append(self._end_thread)
        self._queue.put((cast("GpuOp", op), work))
        return work

    def free(self) -> None:
        """Collective. Wait for all operations, and release the buffers and the communicator."""
        self._end_thread()
        if self._failure is not None:  # on all members, by the barriers
            self._close_buffers()
            return
        try:
            self._close_buffers()
        finally:
            with watched("closing exchange buffers on GPUs", self._comm.Get_group()):
                self._comm.Barrier()  # memory must not be freed while another rank has it open
        self._memory = None
        self._host.free()

    def abandon(self) -> None:
        """Close the buffers without the other ranks. They stay open while an operation runs."""
        if not self._queue.unfinished_tasks:
            self._close_buffers()

    # Inside

    def _open_buffers(self) -> str:
        """Collective. Open the exchange buffers. Return the problem of a rank, or ""."""
        handle, problem = b"", ""
        try:
            self._stream = new_stream(self._device)
            with on_device(self._device, "allocating an exchange buffer") as package:
                self._memory = package.cuda.Memory(2 * CHUNK_BYTES)
                handle = bytes(package.cuda.runtime.ipcGetMemHandle(self._memory.ptr))
        except Exception as error:  # every rank is told, and stages
            problem = str(error)
        told = self._comm.allgather((handle, problem))
        problem = self._first_problem([text for _, text in told])
        if not problem:
            try:
                self._open([handle for handle, _ in told])
            except Exception as error:  # as above
                problem = str(error)
            problem = self._first_problem(self._comm.allgather(problem))
        if problem:
            self._close_buffers()
            self._comm.Barrier()  # memory must not be freed while another rank has it open
            self._memory = None
        return problem

    def _open(self, handles: list[bytes]) -> None:
        with on_device(self._device, "opening the exchange buffer of another rank") as package:
            runtime = package.cuda.runtime
            for rank, handle in enumerate(handles):
                address = self._memory.ptr
                if rank != self._rank:
                    flags = runtime.cudaIpcMemLazyEnablePeerAccess
                    address = int(runtime.ipcOpenMemHandle(handle, flags))
                    self._opened.append(address)
                self._buffers.append(address)

    def _first_problem(self, problems: list[str]) -> str:
        ranks = [rank for rank, text in enumerate(problems) if text]
        return f"group rank {ranks[0]}: {problems[ranks[0]]}" if ranks else ""

    def _close_buffers(self) -> None:
        if self._opened:
            with on_device(self._device, "closing the exchange buffers of other ranks") as package:
                while self._opened:
                    package.cuda.runtime.ipcCloseMemHandle(self._opened.pop())

    def _serve(self) -> None:
        make_current(self._device)
        while (entry := self._queue.get()) is not None:
            op, work = entry
            self._waits.current[id(work)] = op
            error: BaseException | None = None
            try:
                self._carry_out(op)
            except BaseException as raised:  # the Work ends with it
                error = backend_error(op, raised) if isinstance(raised, self.error) else raised
            finally:
                self._waits.current.pop(id(work), None)
                self._pending.pop(id(work), None)
                self._queue.task_done()
            work.complete(op.outputs if error is None else None, error)
            del entry, op, work, error  # the thread must not keep arrays while it waits
        self._queue.task_done()

    def _end_thread(self) -> None:
        """Wait until the thread has run all queued operations, and end it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
            with suppress(ValueError):  # removed by an earlier call
                world().shutdown.before_leave.remove(self._end_thread)

    def _carry_out(self, op: GpuOp) -> None:
        """Run an operation on this thread. An error ends the group, since other ranks may wait."""
        if self._failure is not None:
            raise DistBackendError(
                f"{op.describe()} has not run, because an earlier operation has failed: "
                f"{self._failure}"
            )
        try:
            if not self.problem and self._all_true(op.source is not None):
                self._run_steps(op)
            else:
                self._stage(op)
        except BaseException as error:
            self._failure = self._failure or error
            self._mark_broken(op.name, error)
            raise

    def _stage(self, op: GpuOp) -> None:
        """Run an operation on host memory.

        The host waits for the streams, because the thread has a current stream of its own.
        """
        text = op.describe()
        staged: Op | None = None
        try:
            for one, event in zip(op.arrays, op.events, strict=True):
                with on_device(one.device, text):
                    wait_for(event, text)
            staged = op.stage()
        finally:
            all_staged = self._all_true(staged is not None)
        if not all_staged or staged is None:
            raise DistBackendError(f"another rank cannot stage its arrays of {text}")
        try:
            self._host.run(staged)
            if staged.finish is not None:
                staged.finish()
            for one in op.arrays:
                with on_device(one.device, text):
                    synchronize(one.device, text)
        except BaseException:
            self._all_true(False)  # the others are in their next barrier
            raise
        self._barrier(text)

    def _run_steps(self, op: GpuOp) -> None:
        text = op.describe()
        in_barrier = False
        with on_device(self._device, text):
            try:
                for event in op.events:
                    wait_for(event, text)
                with use_stream(self._stream):
                    for _ in _STEPS[op.name](self, op, op.source, op.result):
                        wait_for(record_event(self._stream), text)
                        in_barrier = True
                        self._barrier(text)
                        in_barrier = False
                op.unpack(self._stream)
                wait_for(record_event(self._stream), text)
            except BaseException:
                if not in_barrier:
                    self._all_true(False)  # the others are in their next barrier
                raise
            self._barrier(text)

    def _barrier(self, text: str) -> None:
        """Collective. Wait for all members; raise DistBackendError if one has failed."""
        if not self._all_true(True):
            raise DistBackendError(f"another rank has failed in {text}")

    def _all_true(self, value: bool) -> bool:
        """Collective. Return whether a value is true on all members."""
        from mpi4py import MPI

        values = np.array([value], np.int8)
        self._comm.Allreduce(MPI.IN_PLACE, values, MPI.MIN)
        return bool(values[0])

    # The operations. Arguments: the operation, and the packed input and output.

    def _all_reduce(self, op: GpuOp, source: Any, output: Any) -> Steps:
        """Reduce by reduce-scatter and all-gather of each chunk, in place."""
        for half, start, length in self._chunks(output.nbytes, CHUNK_BYTES):
            self._copy(self._own(half), source.data.ptr + start, length)
            yield
            part = -(-length // self._size // _ALIGNED) * _ALIGNED
            ends = [min(rank * part, length) for rank in range(self._size + 1)]
            begin, end = ends[self._rank : self._rank + 2]
            self._combine(op, self._own(half) + begin, half, begin, end - begin)
            yield
            for rank in self._ring():
                begin, end = ends[rank : rank + 2]
                place = self._buffers[rank] + half + begin
                self._copy(output.data.ptr + start + begin, place, end - begin)

    def _reduce(self, op: GpuOp, source: Any, output: Any) -> Steps:
        for half, start, length in self._chunks(output.nbytes, CHUNK_BYTES):
            self._copy(self._own(half), source.data.ptr + start, length)
            yield
            if self._rank == op.root:
                self._combine(op, output.data.ptr + start, half, 0, length)

    def _broadcast(self, op: GpuOp, source: Any, output: Any) -> Steps:
        for half, start, length in self._chunks(output.nbytes, CHUNK_BYTES):
            if self._rank == op.root:
                self._copy(self._own(half), source.data.ptr + start, length)
            yield
            if self._rank != op.root:
                self._copy(output.data.ptr + start, self._buffers[op.root] + half, length)

    def _all_gather(self, op: GpuOp, source: Any, output: Any) -> Steps:
        part = source.nbytes
        for half, start, length in self._chunks(part, CHUNK_BYTES):
            self._copy(self._own(half), source.data.ptr + start, length)
            yield
            for rank in self._ring():
                place = output.data.ptr + rank * part + start
                self._copy(place, self._buffers[rank] + half, length)

    def _reduce_scatter(self, op: GpuOp, source: Any, output: Any) -> Steps:
        part = output.nbytes
        for half, start, length in self._chunks(part, self._room):
            self._spread(source, half, start, length, part)
            yield
            self._combine(op, output.data.ptr + start, half, self._rank * self._room, length)

    def _all_to_all(self, op: GpuOp, source: Any, output: Any) -> Steps:
        part = source.nbytes // self._size
        for half, start, length in self._chunks(part, self._room):
            self._spread(source, half, start, length, part)
            yield
            for rank in self._ring():
                place = self._buffers[rank] + half + self._rank * self._room
                self._copy(output.data.ptr + rank * part + start, place, length)

    def _chunks(self, nbytes: int, most: int) -> Iterator[tuple[int, int, int]]:
        """Yield the offset of a half of the buffers, and start and length of a chunk, in bytes.

        Consecutive chunks use alternate halves (double buffering). A rank enters the barrier of
        chunk n+1 only after its reads of chunk n. So after that barrier chunk n+2 may overwrite the
        half of chunk n.
        """
        for start in range(0, nbytes, most):
            self._half ^= 1
            yield self._half * CHUNK_BYTES, start, min(most, nbytes - start)

    def _spread(self, source: Any, half: int, start: int, length: int, part: int) -> None:
        """Copy a chunk of the part for each rank into the own buffer."""
        for rank in range(self._size):
            place = self._own(half) + rank * self._room
            self._copy(place, source.data.ptr + rank * part + start, length)

    def _combine(self, op: GpuOp, target: int, half: int, begin: int, nbytes: int) -> None:
        """Reduce the same bytes of all buffers into memory of this rank."""
        if not nbytes:
            return
        dtype, places = op.output.dtype, [buffer + half + begin for buffer in self._buffers]
        parts = [numbers_at(place, nbytes, dtype, self._device) for place in places]
        out = numbers_at(target, nbytes, dtype, self._device)
        if target in places:  # the kernel takes one of its inputs as output
            out = parts[places.index(target)]
        combine(parts, out, dtype, op.op.name)

    def _own(self, half: int) -> int:
        return self._buffers[self._rank] + half

    def _ring(self) -> list[int]:
        """Return all ranks; each rank begins with itself, so that they read different buffers."""
        return [(self._rank + distance) % self._size for distance in range(self._size)]

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            runtime = cupy().cuda.runtime
            kind = runtime.memcpyDeviceToDevice  # peers included
            runtime.memcpyAsync(target, source, nbytes, kind, self._stream.ptr)


_STEPS: dict[str, Callable[[IpcBackend, GpuOp, Any, Any], Steps]] = {
    "all_reduce": IpcBackend._all_reduce,
    "reduce": IpcBackend._reduce,
    "broadcast": IpcBackend._broadcast,
    "all_gather_into_tensor": IpcBackend._all_gather,
    "reduce_scatter_tensor": IpcBackend._reduce_scatter,
    "all_to_all_single": IpcBackend._all_to_all,
}
