"""The backend that runs collectives through CUDA IPC, for ranks of one host that may share a GPU.

Each rank allocates one exchange buffer on its GPU, which the others open once (CUDA C++ Programming
Guide, "Interprocess Communication"). An operation copies an array into the buffers chunk by chunk,
the ranks meet on the host, and each rank reads what it needs from the buffers of the others. So an
array may lie in memory of any kind: of a pool, managed, strided, or of another GPU.

The host waits for the copies and kernels before the ranks meet. Events that processes share would
spare that wait, but a kernel that never ends would then hang ranks without a word.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.errors import DistBackendError
from mpidist.gpu import on_device, record_event, synchronize, wait_for
from mpidist.gpu.reductions import combine, numbers_at
from mpidist.gpu.streams import CommStream, use_stream
from mpidist.group.gpu_operation import GpuOp
from mpidist.group.mpi_backend import MpiBackend, backend_error
from mpidist.group.operation import Op
from mpidist.mpi import PendingOps, watched
from mpidist.work import Work

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("mpidist")

CHUNK_BYTES = 16 << 20
"""Size of one chunk. The exchange buffer has room for two, which are used in turn."""
_ALIGNED = 256  # bytes; a multiple of the size of every element

Steps = Iterator[None]
"""An operation on one rank. The ranks meet wherever it yields."""


class IpcBackend:
    """Runs collectives of arrays on GPUs; see :class:`mpidist.group.backend.Backend`.

    Collective. The members tell each other whether their arrays are on GPUs. If not all are, or if
    a GPU cannot open the buffers of the others, all stage the operation on the host.

    Asynchronous operations run on a thread, in order. A communicator of its own keeps their
    messages apart from the other operations of the group.

    Args:
        comm: The communicator of the group.
        device: Index of this rank's GPU.
        waits: The registry of operations in which threads are blocked.
        pending: The registry of works that have not ended, by id.
        tear: Called with an operation and its error if the group cannot go on.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        device: int,
        waits: PendingOps,
        pending: MutableMapping[int, Work],
        tear: Callable[[str, BaseException], None],
    ) -> None:
        from mpi4py import MPI

        self.error: type[Exception] = MPI.Exception
        with watched("making exchange buffers on GPUs", comm.Get_group()):
            self._comm = comm.Dup()
        self._rank, self._size, self._device = comm.rank, comm.size, device
        self._waits, self._pending, self._tear = waits, pending, tear
        self._host = MpiBackend(self._comm, waits, pending)
        self._stream = CommStream(device)
        self._half = 0
        self._buffers: list[int] = []  # addresses in this process, by group rank
        self._opened: list[int] = []
        self._memory: Any = None
        self._queue: queue.SimpleQueue[tuple[GpuOp, Work] | None] = queue.SimpleQueue()
        self._queued = 0  # operations that the thread has not finished
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        with watched("opening exchange buffers on GPUs", comm.Get_group()):
            self.problem = self._open_buffers()
            """The reason why all operations are staged, or ""."""
        if self.problem:
            logger.warning("CUDA IPC cannot be used, arrays on GPUs are staged: %s", self.problem)

    def run(self, op: Op) -> None:
        """Run an operation; see :meth:`mpidist.group.backend.Backend.run`."""
        if self._queued:
            self.start(op).wait()
        else:
            self._carry_out(cast("GpuOp", op))

    def start(self, op: Op) -> Work:
        """Queue an operation for the thread; see :meth:`mpidist.group.backend.Backend.start`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="mpidist-ipc", daemon=True)
            self._thread.start()
        work = Work(op.name)
        self._pending[id(work)] = work
        with self._count_lock:
            self._queued += 1
        self._queue.put((cast("GpuOp", op), work))
        return work

    def free(self) -> None:
        """Collective. Release the buffers and the communicator; no operation is pending."""
        self._end_thread()
        self._close_buffers()
        with watched("closing exchange buffers on GPUs", self._comm.Get_group()):
            self._comm.Barrier()  # memory must not be freed while another rank has it open
        self._memory = None
        self._host.free()

    def abandon(self) -> None:
        """Close the buffers of other ranks, if these cannot join :meth:`free`.

        An operation that is still under way keeps them.
        """
        self._end_thread()
        if not self._queued:
            self._close_buffers()

    # Inside

    def _open_buffers(self) -> str:
        """Collective. Open the exchange buffers. Return the problem of a rank, or ""."""
        handle, problem = b"", ""
        try:
            with on_device(self._device, "allocating an exchange buffer") as package:
                self._memory = package.cuda.Memory(2 * CHUNK_BYTES)
                handle = bytes(package.cuda.runtime.ipcGetMemHandle(self._memory.ptr))
        except Exception as error:  # every rank is told, and stages
            problem = str(error)
        told = self._comm.allgather((handle, problem))
        problem = self._first_problem([text for _, text in told])
        if problem:
            return problem
        try:
            with on_device(self._device, "opening the exchange buffer of another rank") as package:
                runtime = package.cuda.runtime
                for rank, (other, _) in enumerate(told):
                    address = self._memory.ptr
                    if rank != self._rank:
                        flags = runtime.cudaIpcMemLazyEnablePeerAccess
                        address = int(runtime.ipcOpenMemHandle(other, flags))
                        self._opened.append(address)
                    self._buffers.append(address)
        except Exception as error:  # as above
            problem = str(error)
        problem = self._first_problem(self._comm.allgather(problem))
        if problem:
            self._close_buffers()
        return problem

    def _first_problem(self, problems: list[str]) -> str:
        ranks = [rank for rank, text in enumerate(problems) if text]
        return f"group rank {ranks[0]}: {problems[ranks[0]]}" if ranks else ""

    def _close_buffers(self) -> None:
        with on_device(self._device, "closing the exchange buffers of other ranks") as package:
            while self._opened:
                package.cuda.runtime.ipcCloseMemHandle(self._opened.pop())

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            op, work = entry
            self._waits.current[id(work)] = op
            error: BaseException | None = None
            try:
                self._carry_out(op)
            except BaseException as raised:  # the Work ends with it
                error = raised
                if isinstance(error, self.error):
                    error = backend_error(op, raised)
            finally:
                self._waits.current.pop(id(work), None)
                self._pending.pop(id(work), None)
                with self._count_lock:
                    self._queued -= 1
            outputs = op.outputs
            del entry, op  # the thread must not keep arrays while it waits
            work.complete(outputs if error is None else None, error)
            del work

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _carry_out(self, op: GpuOp) -> None:
        """Run an operation on this thread. An error ends the group, since other ranks may wait."""
        try:
            here = op.on_gpu and all(one.device == self._device for one in op.arrays)
            if not self.problem and self._all(here):
                self._run_steps(op)
            else:
                self._stage(op)
        except BaseException as error:
            self._tear(op.name, error)
            raise

    def _stage(self, op: GpuOp) -> None:
        """Run an operation on host memory.

        The host waits for the streams, because the thread has a current stream of its own.
        """
        text = op.describe()
        for one in op.arrays:
            with on_device(one.device, text):
                wait_for(record_event(one.stream), text)
        staged = op.stage()
        self._host.run(staged)
        if staged.finish is not None:
            staged.finish()
        for one in op.arrays:
            with on_device(one.device, text):
                synchronize(one.device, text)

    def _run_steps(self, op: GpuOp) -> None:
        text = op.describe()
        steps = _STEPS[op.name]
        with on_device(self._device, text):
            meeting = False
            try:
                source, output = op.packed()
                for one in op.arrays:
                    wait_for(record_event(one.stream), text)
                with use_stream(self._stream.stream):
                    for _ in steps(self, op, source, output):
                        wait_for(record_event(self._stream.stream), text)
                        meeting = True
                        self._meet(text)
                        meeting = False
                    wait_for(record_event(self._stream.stream), text)
                op.unpack(output)
            except BaseException:
                if not meeting:
                    self._all(False)  # the others wait at their next meeting
                raise

    def _meet(self, text: str) -> None:
        if not self._all(True):
            raise DistBackendError(f"another rank has failed in {text}")

    def _all(self, value: bool) -> bool:
        """Collective. Return whether a value is true on all members."""
        from mpi4py import MPI

        values = np.array([value], np.int8)
        self._comm.Allreduce(MPI.IN_PLACE, values, MPI.MIN)
        return bool(values[0])

    # The operations. Arguments: the operation, and the packed input and output.

    def _all_reduce(self, op: GpuOp, source: Any, output: Any) -> Steps:
        """Reduce by reduce-scatter and all-gather of each chunk, in place."""
        dtype = op.output.dtype
        for half, start, length in self._chunks(output.nbytes, CHUNK_BYTES):
            self._copy(self._own(half), source.data.ptr + start, length)
            yield
            part = -(-length // self._size // _ALIGNED) * _ALIGNED
            ends = [min(rank * part, length) for rank in range(self._size + 1)]
            begin, end = ends[self._rank : self._rank + 2]
            self._combine(op, self._own(half) + begin, half, begin, end - begin, dtype)
            yield
            for rank in self._ring():
                begin, end = ends[rank : rank + 2]
                place = self._buffers[rank] + half + begin
                self._copy(output.data.ptr + start + begin, place, end - begin)

    def _reduce(self, op: GpuOp, source: Any, output: Any) -> Steps:
        dtype = op.output.dtype
        for half, start, length in self._chunks(output.nbytes, CHUNK_BYTES):
            self._copy(self._own(half), source.data.ptr + start, length)
            yield
            if self._rank == op.root:
                self._combine(op, output.data.ptr + start, half, 0, length, dtype)

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
        dtype, part = op.output.dtype, output.nbytes
        for half, start, length, room in self._part_chunks(part):
            self._spread(source, half, start, length, room, part)
            yield
            place = output.data.ptr + start
            self._combine(op, place, half, self._rank * room, length, dtype)

    def _all_to_all(self, op: GpuOp, source: Any, output: Any) -> Steps:
        part = source.nbytes // self._size
        for half, start, length, room in self._part_chunks(part):
            self._spread(source, half, start, length, room, part)
            yield
            for rank in self._ring():
                place = self._buffers[rank] + half + self._rank * room
                self._copy(output.data.ptr + rank * part + start, place, length)

    def _chunks(self, nbytes: int, most: int) -> Iterator[tuple[int, int, int]]:
        """Yield the offset of a half of the buffers, and begin and length of a chunk, in bytes.

        The halves take turns. A rank that fills one has met the others since all of them have read
        its last contents, because they meet at least once in every chunk.
        """
        for start in range(0, nbytes, most):
            self._half ^= 1
            yield self._half * CHUNK_BYTES, start, min(most, nbytes - start)

    def _part_chunks(self, part: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the same for chunks of the parts for all ranks, and the room for each part."""
        room = CHUNK_BYTES // self._size // _ALIGNED * _ALIGNED
        for half, start, length in self._chunks(part, room):
            yield half, start, length, room

    def _spread(
        self, source: Any, half: int, start: int, length: int, room: int, part: int
    ) -> None:
        """Copy a chunk of the part for each rank into the own buffer."""
        for rank in range(self._size):
            place = self._own(half) + rank * room
            self._copy(place, source.data.ptr + rank * part + start, length)

    def _combine(
        self, op: GpuOp, target: int, half: int, begin: int, nbytes: int, dtype: np.dtype[Any]
    ) -> None:
        """Reduce the same bytes of all buffers into memory of this rank."""
        if not nbytes:
            return
        places = [buffer + half + begin for buffer in self._buffers]
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
            self._stream.copy(target, source, nbytes)


_STEPS: dict[str, Callable[[IpcBackend, GpuOp, Any, Any], Steps]] = {
    "all_reduce": IpcBackend._all_reduce,
    "reduce": IpcBackend._reduce,
    "broadcast": IpcBackend._broadcast,
    "all_gather_into_tensor": IpcBackend._all_gather,
    "reduce_scatter_tensor": IpcBackend._reduce_scatter,
    "all_to_all_single": IpcBackend._all_to_all,
}
