"""Operations on the memory of GPUs, without a copy on the host, and the memory that MPI takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.buffers.host_view import Array, check_array, host_view
from mpidist.buffers.packing import NATIVE
from mpidist.buffers.reduce_op import ReduceOp, Reduction, is_direct
from mpidist.errors import FailedPreconditionError
from mpidist.gpu import DeviceArray, cupy, lies_on_gpu, on_device, record_event, wait_for
from mpidist.gpu.kernels import as_numbers, can_reduce, is_half, widened
from mpidist.gpu.streams import use_stream
from mpidist.group.gpu_rule import IPC_MIN_BYTES, GpuRule
from mpidist.group.operation import LARGEST_COUNT, GroupInfo, Op, Signature

REDUCING = frozenset(("all_reduce", "reduce", "reduce_scatter_tensor"))
MOVING = frozenset(("broadcast", "all_gather_into_tensor", "all_to_all_single"))


class GpuOp(Op):
    """A collective of arrays on GPUs.

    Args:
        name: The method of :class:`mpidist.ProcessGroup`.
        group: The group.
        arrays: The arrays of this rank that are on GPUs, the output first. all_reduce, reduce and
            broadcast have one array.
        writes: Whether this rank receives a result.
        op: The reduction; SUM where there is none.
        root: Group rank of the root; -1 if there is none.
        signature: The signature for the comparison between members.
        stage: Returns the same operation on host memory; called on the thread that runs it.

    Attributes:
        source: The flat array that the backend reads. None if the arrays are empty, or not all on
            this rank's GPU of the group.
        result: The flat array that the backend writes; None likewise.
        packed_output: The output, see :meth:`mpidist.gpu.DeviceArray.packed`; None likewise.
        events: Events behind the work that was queued on the streams of the arrays.
    """

    source: Any = None
    result: Any = None
    packed_output: Any = None

    def __init__(
        self,
        name: str,
        group: GroupInfo,
        arrays: Sequence[DeviceArray],
        writes: bool,
        op: ReduceOp,
        root: int,
        signature: Signature,
        stage: Callable[[], Op],
    ) -> None:
        super().__init__(name, group, root=root)
        self.arrays = arrays
        self.writes = writes
        self.op = op
        self.signature = signature
        self.stage = stage
        self.events: list[Any] = []

    def without_arrays(self) -> Op:
        """Return the operation for the watchdog, which must not keep arrays alive."""
        marker = Op(self.name, self.group, root=self.root)
        marker.sequence, marker.signature = self.sequence, self.signature
        return marker

    @property
    def output(self) -> DeviceArray:
        """The output array, if all arrays are on GPUs."""
        return self.arrays[0]

    @property
    def input(self) -> DeviceArray:
        """The input array, if all arrays are on GPUs."""
        return self.arrays[-1]

    def pack(self, *, as_numbers_of_nccl: bool) -> None:
        """Make the arrays that the backend reads and writes, on the streams of the arrays.

        This comes before the submission: a rank that fails here has not begun its part of the
        operation, and can call again.

        Args:
            as_numbers_of_nccl: Whether NCCL reduces them; float16 and bfloat16 in float32.
        """
        source = result = self.packed_output = self.output.packed()
        if self.input is not self.output:
            # An input that may share memory with the output is copied.
            overlaps = np.may_share_memory(self.input.header, self.output.header)
            source = self.input.packed(copy=overlaps)
        if as_numbers_of_nccl:
            dtype, in_place = self.output.dtype, source is result
            source, result = as_numbers(source, dtype), as_numbers(result, dtype)
            if is_half(dtype):
                with use_stream(self.input.stream):
                    source = widened(source, dtype)
                with use_stream(self.output.stream):
                    result = source if in_place else cupy().empty(result.shape, "f4")
        self.source, self.result = source, result

    def unpack(self, stream: Any = None) -> None:
        """Copy the packed output back, if the array is strided and receives a result.

        Args:
            stream: The stream that copies, by default the stream of the array.
        """
        if self.writes:
            self.output.unpack(self.packed_output, stream)


def gpu_op(
    info: GroupInfo,
    rule: GpuRule,
    device: int,
    name: str,
    arrays: Sequence[Any],
    op: Reduction | str,
    root: int,
    stage: Callable[[], Op],
) -> GpuOp | None:
    """Return a collective for the group's GPU backend; None if MPI runs it on host memory.

    All members must make the same decision. So it depends on the operation, the reduction, the
    dtype, the size and, with NCCL, on the place of the arrays, which the comparison of calls
    checks. The host's path also reports wrong arguments.

    Args:
        info: The group.
        rule: The rule of the group.
        device: Index of this rank's GPU.
        name: The method of the group.
        arrays: The array that receives and, if it is another, the array that is read.
        op: The reduction or its name.
        root: Group rank of the root; -1 if there is none.
        stage: See :class:`GpuOp`.

    Raises:
        ValueError: With NCCL, an array lies on another GPU than the group's.
        ResourceExhaustedError: The device has no memory to pack or widen the arrays.
        DistBackendError: CUDA failed.
    """
    if rule.backend == "ipc" and all(
        getattr(array, "nbytes", IPC_MIN_BYTES) < IPC_MIN_BYTES for array in arrays
    ):
        return None
    reduction = ReduceOp.of(op)
    on_gpu = all(array.__class__ is not np.ndarray and lies_on_gpu(array) for array in arrays)
    if not isinstance(reduction, ReduceOp) or (rule.backend == "nccl" and not on_gpu):
        return None
    try:
        devices = [DeviceArray(array) if lies_on_gpu(array) else None for array in arrays]
        views = [
            host_view(array) if one is None else one
            for array, one in zip(arrays, devices, strict=True)
        ]
    except (FailedPreconditionError, TypeError, ValueError):
        return None  # the host's path raises the error
    dtype = views[0].dtype
    # The header of an array on a GPU has its address, shape and strides.
    headers = [view.header if isinstance(view, DeviceArray) else view for view in views]
    nbytes = max(header.nbytes for header in headers)
    if rule.backend == "ipc" and nbytes < IPC_MIN_BYTES:
        return None
    if name in REDUCING and not can_reduce(dtype, reduction.name):
        return None
    if rule.backend == "nccl" and name in REDUCING and dtype.kind in "iu" and dtype.itemsize == 2:
        return None  # NCCL has no integers of 16 bits
    # The root of a broadcast, and every rank but the root of a reduce, only send.
    reads_only = (name, root == info.rank) in (("broadcast", True), ("reduce", False))
    if any(view.dtype != dtype for view in views) or not _fit(name, headers, info.size):
        return None
    check_array(headers[0], write=not reads_only)
    on_gpus = [one for one in devices if one is not None]
    if rule.backend == "nccl":
        for one in on_gpus:
            if one.device != device:
                raise ValueError(
                    f"{name} of {one}, but group {info.name!r} uses GPU {device} on rank "
                    f"{info.ranks[info.rank]}: make the array there, or give device_id to "
                    "init_process_group"
                )
    shape = headers[0].shape if name in ("all_reduce", "reduce") else (headers[0].size,)
    if name in MOVING:
        shape = (nbytes,)
    kind = dtype.name if name in REDUCING else "uint8"
    code = +reduction if name in REDUCING else 0
    signature = name, code, root, shape, kind, rule.backend
    record = GpuOp(name, info, on_gpus, not reads_only, reduction, root, signature, stage)
    if nbytes and on_gpu and all(one.device == device for one in on_gpus):
        with on_device(device, "packing the arrays of %s", name):
            record.pack(as_numbers_of_nccl=rule.backend == "nccl" and name in REDUCING)
    if rule.backend == "ipc":  # whose thread waits for the work that is queued on the streams now
        for one in on_gpus:
            with on_device(one.device, "queueing %s", name):
                record.events.append(record_event(one.stream))
    return record


def _fit(name: str, headers: Sequence[Array], members: int) -> bool:
    """Return whether the sizes fit; if not, the host's path raises the error."""
    taken, given = headers[0], headers[-1]
    if name == "all_gather_into_tensor":
        return taken.nbytes == members * given.nbytes
    if name == "reduce_scatter_tensor":
        return given.nbytes == members * taken.nbytes
    if name == "all_to_all_single":
        rows = [header.shape[0] if header.shape else 1 for header in headers]
        return taken.nbytes == given.nbytes and not any(row % members for row in rows)
    return True


class DeviceMemory:
    """Memory of a GPU with the attributes of an array that an Op and mpi4py need.

    Args:
        array: A contiguous array.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._array = array  # keeps the memory
        self.dtype = array.dtype
        self.nbytes = array.nbytes
        self.shape = array.shape
        self.size = array.nbytes // array.dtype.itemsize
        self.__cuda_array_interface__ = {
            "data": (array.pointer, False),
            "shape": (self.size,),
            "typestr": array.dtype.str,
            "version": 3,
        }


def device_memory(array: Any, *, write: bool) -> DeviceMemory | None:
    """Wait for the stream of an array on a GPU, and return its memory.

    MPI is not stream-aware, so the host waits.

    Args:
        array: Any array.
        write: Whether MPI writes it.

    Returns:
        None if the array has to be staged: it is not on a GPU, strided, too long, read-only though
        MPI writes it, or of a dtype that MPI does not know.
    """
    if not lies_on_gpu(array):
        return None
    there = DeviceArray(array)
    known = there.dtype.type in NATIVE and there.dtype.isnative
    if not known or not there.is_contiguous or (write and not there.writeable):
        return None
    if there.header.size > LARGEST_COUNT:
        return None
    text = "waiting for the array of an operation of MPI"
    with on_device(there.device, text):
        wait_for(record_event(there.stream), text)
    return DeviceMemory(there)


def device_memory_op(
    info: GroupInfo, name: str, array: Any, op: Reduction | str, root: int
) -> Op | None:
    """Return an all_reduce or a broadcast on the memory of a GPU; None if it has to be staged.

    The other collectives are several calls of MPI, or use its arrays on the host.
    """
    if name not in ("all_reduce", "broadcast"):
        return None
    memory: Any = device_memory(array, write=root != info.rank)
    if memory is None:
        return None
    if name == "broadcast":
        return Op(name, info, None, memory, root=root)
    reduction = ReduceOp.of(op)
    if not isinstance(reduction, ReduceOp) or not is_direct(np.dtype(memory.dtype), reduction):
        return None
    return Op(name, info, None, memory, reduction)
