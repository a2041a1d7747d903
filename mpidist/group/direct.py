"""Groups whose large operations on GPUs go by the fastest way that there is."""

from __future__ import annotations

import math
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays import host_view
from mpidist.cuda import DeviceArray, NotDirectError, Way, lies_on_gpu
from mpidist.errors import FailedPreconditionError
from mpidist.group.direct_call import Call, on_gpus
from mpidist.group.operation import Op
from mpidist.group.process_group import ProcessGroup, are_given
from mpidist.group.way_table import WayTable
from mpidist.group.ways import NAMES, Ways
from mpidist.reduce_op import ReduceOp, Reduction
from mpidist.work import Timeout, Work

if TYPE_CHECKING:
    from mpi4py import MPI

_NOTHING = np.empty(0, np.uint8)
_ON_GPU = 4  # in the notice: whether the arrays are on GPUs; then one number for each way


class DirectGroup(ProcessGroup):
    """Collective. A :class:`ProcessGroup` for ranks that have GPUs.

    Operations on arrays of the host are those of any group, and so are asynchronous and prepared
    ones, messages, and those on lists. Of blocking ones of 64 KiB and more the members first tell
    each other, in one small reduction, whether the arrays of all of them lie on GPUs. Where they
    do, the operation goes by the fastest way that all have; see :attr:`ways`.

    Arguments and attributes as of :class:`ProcessGroup`.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: Timeout = None) -> None:
        self._ways = Ways(self)
        super().__init__(comm, name, timeout)
        self._direct_turn = threading.RLock()

    @property
    def ways(self) -> WayTable:
        """Local. The ways between the GPUs of the members; empty before the first operation."""
        return self._ways.table

    def free(self) -> None:
        """Collective. As :meth:`ProcessGroup.free`."""
        self._submission.check_alive()
        if not self._submission.is_torn:
            self._ways.close()
        else:
            self._ways.abandon()
        super().free()

    def __del__(self) -> None:
        # Of a group that was dropped, others must get back what they have freed.
        if not sys.is_finalizing():
            self._ways.abandon()

    def all_reduce(
        self, array: Any, op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. As :meth:`ProcessGroup.all_reduce`."""
        if async_op or not self._goes("all_reduce", [array], op):
            return super().all_reduce(array, op, async_op)
        return None

    def reduce(
        self,
        array: Any,
        dst: int | None = None,
        op: Reduction | str = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Collective. As :meth:`ProcessGroup.reduce`."""
        root = self._peer("dst", dst, group_dst)
        if async_op or not self._goes("reduce", [array], op, root):
            return super().reduce(array, dst, op, async_op, group_dst)
        return None

    def broadcast(
        self,
        array: Any,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Collective. As :meth:`ProcessGroup.broadcast`."""
        root = self._peer("src", src, group_src)
        if async_op or not self._goes("broadcast", [array], None, root):
            return super().broadcast(array, src, async_op, group_src)
        return None

    def all_gather_into_tensor(
        self, output: Any, input: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. As :meth:`ProcessGroup.all_gather_into_tensor`."""
        if async_op or not self._goes("all_gather_into_tensor", [output, input]):
            return super().all_gather_into_tensor(output, input, async_op)
        return None

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: Reduction | str = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. As :meth:`ProcessGroup.reduce_scatter_tensor`."""
        if async_op or not self._goes("reduce_scatter_tensor", [output, input], op):
            return super().reduce_scatter_tensor(output, input, op, async_op)
        return None

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. As :meth:`ProcessGroup.all_to_all_single`."""
        unequal = are_given(input_split_sizes) or are_given(output_split_sizes)
        if async_op or unequal or not self._goes("all_to_all_single", [output, input]):
            return super().all_to_all_single(
                output, input, output_split_sizes, input_split_sizes, async_op
            )
        return None

    # Inside

    def _repeating(
        self, name: str, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[Op, bool], Any]:
        nbytes = max((buffer.nbytes for buffer, _ in op.buffers()), default=0)
        if nbytes < self._ways.from_bytes:
            return super()._repeating(name, op, args, kwargs)
        # Members that call it plainly ask first whether anybody's arrays are on a GPU.
        return lambda _, async_op: getattr(self, name)(*args, **kwargs, async_op=async_op)

    def _send_op(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> Op:
        memory = self._ways.message(array, write=False)
        if memory is None:
            return super()._send_op(array, dst, tag, group_dst)
        record = super()._send_op(_NOTHING, dst, tag, group_dst)
        record.send = memory
        return record

    def _recv_op(
        self,
        array: Any,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        timeout: Timeout = None,
    ) -> Op:
        memory = self._ways.message(array, write=True)
        if memory is None:
            return super()._recv_op(array, src, tag, group_src, timeout)
        record = super()._recv_op(_NOTHING, src, tag, group_src, timeout)
        record.recv = memory
        return record

    def _goes(
        self,
        name: str,
        arrays: Sequence[Any],
        op: Reduction | str | None = None,
        root: int = -1,
    ) -> bool:
        """Collective. Carry an operation out directly, if that can be.

        Args:
            name: Its name.
            arrays: What receives, and what is read, if that is another.
            op: How values are reduced, if they are.
            root: Group rank of the root, if there is one.

        Returns:
            Whether it has been carried out; the same on all members.
        """
        nbytes = max(map(_nbytes_of, arrays))
        if nbytes < self._ways.from_bytes or self._submission.is_collecting():
            return False
        reduction = "" if op is None else ReduceOp.of(op).name
        call = Call(name, on_gpus(arrays), reduction, root)
        with self._direct_turn:
            notice = self._notice(call, nbytes)
            if not notice[_ON_GPU]:
                return False
            with self._torn_by_errors(name):
                if not self._ways.found:
                    self._ways.find(call.number)
                    notice = self._notice(call, nbytes)
            self._ways.check()
            with self._torn_by_errors(name):
                common = zip(NAMES, notice[_ON_GPU + 1 :], strict=True)
                way = self._ways.choice(nbytes, [name for name, can in common if can])
                return way is not None and self._taken(call, way)

    def _taken(self, call: Call, way: Way) -> bool:
        try:
            call.go(way)
        except NotDirectError as error:  # on all members
            self._ways.refused(way, error)
            return False
        return True

    @contextmanager
    def _torn_by_errors(self, name: str) -> Iterator[None]:
        """Have errors end the group: others may wait half-way."""
        try:
            yield
        except BaseException:
            self._submission.tear(name)
            raise

    def _notice(self, call: Call, nbytes: int) -> list[int]:
        """What all members can do, after each has told what it calls, and what it can.

        Raises:
            ValueError: They call different operations.
        """
        what = zlib.crc32(f"{call.name} {call.reduction} {call.root}".encode())
        can = [call.arrays is not None, *(self._ways.can(name, call) for name in NAMES)]
        notice = np.array([nbytes, -nbytes, what, -what, *can], np.int64)
        record = Op("all_reduce", self._info, None, notice, ReduceOp.MIN)
        self._submission.submit_for_result(record)
        least, most, lowest, highest, *common = notice.tolist()
        if least != -most or lowest != -highest:
            calls: list[Any] = [None] * self._size
            self.all_gather_object(calls, f"{call} of {nbytes} bytes")
            raise ValueError(
                f"the members of group {self.name!r} call different collectives: "
                + "; ".join(f"rank {n} {one}" for n, one in zip(self.ranks, calls, strict=True))
            )
        return [least, most, lowest, highest, *common]


def _nbytes_of(array: Any) -> int:
    """How long an array is; 0 for what is none, of which the way through the host tells."""
    nbytes = getattr(array, "nbytes", None)
    if nbytes is not None:
        return int(nbytes)
    facts = getattr(array, "__cuda_array_interface__", None)
    if facts is not None:
        length: int = math.prod(facts["shape"]) * np.dtype(facts["typestr"]).itemsize
        return length
    try:
        if hasattr(array, "__dlpack__"):
            return DeviceArray(array).nbytes if lies_on_gpu(array) else host_view(array).nbytes
        return memoryview(array).nbytes
    except (TypeError, ValueError, FailedPreconditionError):
        return 0
