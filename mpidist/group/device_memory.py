"""Memory of GPUs that MPI reads and writes itself, with ``MPIDIST_GPU_MPI=1``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.buffers.packing import NATIVE
from mpidist.buffers.reduce_op import ReduceOp, Reduction, is_direct
from mpidist.gpu import DeviceArray, lies_on_gpu, on_device, record_event, wait_for
from mpidist.group.operation import LARGEST_COUNT, GroupInfo, Op


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
    known = there.dtype.char in NATIVE and there.dtype.isnative
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
