"""The way between GPUs by an MPI that takes memory of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import NATIVE
from mpidist.cuda import DeviceArray, NotDirectError, OwnStream, Way, on_device
from mpidist.group.operation import LARGEST_COUNT, Op
from mpidist.reduce_op import ReduceOp, is_direct

if TYPE_CHECKING:
    from mpidist.group.process_group import ProcessGroup


class DeviceMpi(Way):
    """See :class:`mpidist.cuda.Way`. MPI knows no streams: the host waits for them first.

    Large ones of reduce go from member to member, with arithmetic of the host: not this way.

    Args:
        group: Whose.
        number: Of the GPU of this member.
    """

    name = "mpi"
    carries = frozenset(
        (
            "all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor",
            "all_to_all_single",
        )
    )  # fmt: skip

    def __init__(self, group: ProcessGroup, number: int) -> None:
        self._group = group
        self._own = OwnStream(number)

    def close(self) -> None:
        """Local. Nothing is left to do."""

    def abandon(self) -> None:
        """Local. Nothing is left to do."""

    def reduces(self, dtype: np.dtype[Any], op: str) -> bool:
        """Local. What MPI reduces as it is."""
        return op in ReduceOp.__members__ and is_direct(dtype, ReduceOp[op])

    def all_reduce(self, array: DeviceArray, op: str) -> None:
        """Collective. See :class:`mpidist.cuda.Way`."""
        self._run(
            Op("all_reduce", self._group._info, None, _memory(array, array.dtype), ReduceOp[op]),
            array,
        )

    def broadcast(self, array: DeviceArray, root: int) -> None:
        """Collective. See :class:`mpidist.cuda.Way`."""
        unit = _unit(array.nbytes)
        self._run(Op("broadcast", self._group._info, None, _memory(array, unit), root=root), array)

    def all_gather(self, send: DeviceArray, recv: DeviceArray) -> None:
        """Collective. See :class:`mpidist.cuda.Way`."""
        self._move("all_gather", send, recv, _unit(send.nbytes))

    def reduce_scatter(self, send: DeviceArray, recv: DeviceArray, op: str) -> None:
        """Collective. See :class:`mpidist.cuda.Way`."""
        given, taken = (_memory(array, array.dtype) for array in (send, recv))
        record = Op("reduce_scatter", self._group._info, given, taken, ReduceOp[op])
        self._run(record, send, recv)

    def all_to_all(self, send: DeviceArray, recv: DeviceArray) -> None:
        """Collective. See :class:`mpidist.cuda.Way`."""
        self._move("all_to_all", send, recv, _unit(send.nbytes // self._group.size()))

    def message(self, array: DeviceArray) -> Any:
        """Local. Memory that MPI can send, or receive into, once its stream has come so far.

        Returns:
            None if it cannot: it is strided, too long, or of a dtype that MPI does not know.
        """
        if not array.is_contiguous or array.dtype.char not in NATIVE or not array.dtype.isnative:
            return None
        memory = _memory(array, array.dtype)
        if memory.size > LARGEST_COUNT:
            return None
        self._wait_for([array], "a message")
        return memory

    def _move(self, name: str, send: DeviceArray, recv: DeviceArray, unit: np.dtype[Any]) -> None:
        given, taken = (_memory(array, unit) for array in (send, recv))
        self._run(Op(name, self._group._info, given, taken), send, recv)

    def _run(self, op: Op, *arrays: DeviceArray) -> None:
        if op.count() > LARGEST_COUNT:
            raise NotDirectError(f"{op.describe()} moves more than {LARGEST_COUNT} elements")
        self._wait_for(arrays, op.name)
        self._group._submit(op, False)

    def _wait_for(self, arrays: Sequence[DeviceArray], name: str) -> None:
        doing = f"waiting for the arrays of {name}"
        with on_device(self._own.number, doing):
            self._own.catch_up(arrays, doing)


class _Memory:
    """Memory of a device, by the one interface that MPI is to look at."""

    def __init__(self, array: DeviceArray, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.nbytes = array.nbytes
        self.size = array.nbytes // dtype.itemsize
        self.shape = (self.size,)
        self.__cuda_array_interface__ = {
            "data": (array.pointer, False),
            "shape": self.shape,
            "typestr": dtype.str,
            "version": 3,
        }


def _memory(array: DeviceArray, dtype: np.dtype[Any]) -> Any:
    """An array, flat, in a dtype; for an Op, which asks no more of arrays than this has."""
    return _Memory(array, dtype)


def _unit(nbytes: int) -> np.dtype[Any]:
    """What so many bytes are counted in: MPI does not know all dtypes, and has short counts."""
    return np.dtype(f"u{next(width for width in (8, 4, 2, 1) if nbytes % width == 0)}")
