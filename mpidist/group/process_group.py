"""The process group: ranks that act together, with every operation as a method."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeGuard, cast, overload

import numpy as np

from mpidist.buffers.host_view import Array, host_view
from mpidist.buffers.lists import (
    all_direct,
    as_mpi_parts,
    as_single_buffer,
    check_outputs,
    copy_overlapping_inputs,
    flat_buffers,
    flat_output,
    flatten,
    host_views,
    shares_start,
)
from mpidist.buffers.packing import OnComplete, as_mpi_buffer, as_mpi_input, copy_if_overlapping
from mpidist.buffers.reduce_op import (
    NAMED,
    ReduceOp,
    ReduceOpLike,
    Reduction,
    is_direct,
    to_reduce,
    to_reduce_into,
)
from mpidist.config import config
from mpidist.gpu import bus_id
from mpidist.gpu.nccl import nccl_problem
from mpidist.group.coalescing import Coalescing, coalesce, submit_coalesced
from mpidist.group.gpu_operation import device_memory, device_memory_op, gpu_op
from mpidist.group.gpu_rule import GpuFacts, GpuRule, choose
from mpidist.group.monitored_barrier import MonitoredBarrier
from mpidist.group.operation import LARGEST_COUNT, MIN_MESSAGE_BYTES, RESERVED_TAGS, GroupInfo, Op
from mpidist.group.pickled_objects import (
    BLOCK_BYTES,
    ObjectCollectives,
    as_array,
    block_of,
    dump,
    exceeds_block,
    load,
    split_blocks,
)
from mpidist.group.prepared import Prepared, check_repeatable
from mpidist.group.submission import Submission
from mpidist.mpi import watched, world
from mpidist.work import Timeout, Work, seconds

if TYPE_CHECKING:
    from mpi4py import MPI

_counter = itertools.count()
_MONITOR_S = 1800.0  # torch's default


class ProcessGroup:
    """Collective. Ranks that act together, over one communicator of their own.

    Methods have the names and the meaning of the functions of the package, such as
    :func:`mpidist.all_reduce`. They take the arguments of the functions in the same order, without
    ``group`` and with ``array`` in place of ``tensor``. Arrays are NumPy arrays, or anything with
    DLPack, the CUDA array interface or the buffer protocol, with any strides.

    Operations that move data take any dtype without Python objects. Reductions take numbers and
    bools: float16, bfloat16 and float8 reduce in float32, bool reduces by logic, integers wrap
    around as NumPy's do, and AVG and PREMUL_SUM need a floating or complex dtype. An input that
    shares memory with an output is copied first.

    Without a time limit an operation blocks inside MPI, and the watchdog reports a stall. With a
    limit it polls, and raises DeadlineExceededError when the limit passes. A collective past its
    limit stays pending, and the group refuses further collectives until it has completed. Sends and
    receives are not refused. Either all members set a time limit, or none, and all give the same
    ``async_op``: MPI does not match blocking with nonblocking collectives (MPI 4.1, 6.12).

    Every operation raises:
        DeadlineExceededError: The time limit of the group passed.
        DistBackendError: MPI failed.
        GroupBrokenError: A collective cannot run after an earlier operation of the group.
        TypeError: An array is of a type or dtype that the operation does not take.
        ValueError: A receiving array is read-only; a shape, size, dtype or root does not fit; or
            the members call different collectives. The first 100 collectives of a group are
            compared, and later every 256th and the end of the group, with all since the last one.

    Args:
        comm: The communicator; the group owns it from now on.
        name: Name of the group in error messages.
        timeout: Time limit of every operation, in seconds or as a timedelta; None for none.
        device: Index of the GPU of this rank. None stages arrays on GPUs through the host.

    Attributes:
        name: Name of the group in error messages.
        number: Unique, and equal on all members.
        ranks: World rank of each member, by group rank.
        device: Index of the GPU of this rank, or None.
        gpu_rule: The backend for arrays on GPUs, and the reason; ``print`` shows it.
    """

    repeatable: ClassVar[tuple[str, ...]] = (
        "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scan", "broadcast",
        "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all",
        "all_to_all_single", "barrier",
    )  # fmt: skip
    """The operations that :meth:`prepare` takes, beside ``"send"`` and ``"recv"``.

    Not exscan: its first rank receives nothing.
    """

    def __init__(
        self, comm: MPI.Intracomm, name: str, timeout: Timeout = None, device: int | None = None
    ) -> None:
        from mpi4py import MPI

        if comm == MPI.COMM_NULL or comm.Is_inter():
            raise ValueError(
                f"group {name!r} needs a communicator of which this rank is a member, and of one "
                "group: not COMM_NULL, nor an intercommunicator"
            )
        here = world()
        self._comm = comm
        with watched(f"the creation of group {name!r}", comm.Get_group()):
            gpu = None if device is None else (bus_id(device), nccl_problem())
            own = next(_counter) * here.size + here.rank, config.debug, config.gpu_mpi, gpu
            told = comm.allgather(own)
        number, debug, gpu_mpi, _ = told[0]  # all members use the settings of group rank 0
        group, everybody = comm.Get_group(), here.comm.Get_group()
        translated = group.Translate_ranks(list(range(comm.size)), everybody)
        group.Free()
        everybody.Free()
        ranks = tuple(int(rank) for rank in translated)
        self._info = GroupInfo(name, number, ranks, comm.rank, comm.size)
        self._rank, self._size = comm.rank, comm.size
        self._group_rank = {rank: group_rank for group_rank, rank in enumerate(ranks)}
        self.name: str = name
        self.number: int = number
        self.ranks = ranks
        facts = [
            gpu and GpuFacts(here.nodes[rank], *gpu)
            for rank, (*_, gpu) in zip(ranks, told, strict=True)
        ]
        self.device = device
        self.gpu_rule: GpuRule = choose(facts, ranks, gpu_mpi)
        self._uses_gpus = self.gpu_rule.backend != "staged"
        self._submission = Submission(
            comm, self._info, seconds(timeout), debug, self.gpu_rule, device
        )
        self._submit = self._submission.submit
        self._objects = ObjectCollectives(self._info, self._submission)
        self._monitored_barrier = MonitoredBarrier(self._info, self._submission)

    def __repr__(self) -> str:
        state = ", destroyed" if self.freed else ""
        return f"<{type(self).__name__} {self.name!r}: rank {self._rank} of {self._size}{state}>"

    # The group

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def position(self, rank: int) -> int:
        """Return the group rank of a rank of the world; ValueError if it is not a member."""
        return self._peer("rank", rank, None)

    @property
    def comm(self) -> MPI.Intracomm:
        """The group's mpi4py communicator, for operations of MPI beside the group's.

        Messages must name their tag: a receive with ANY_TAG may take a part of an operation of the
        group. The group uses the tags 29000 to 32767.

        Raises:
            ValueError: The group was destroyed.
        """
        self._submission.check_alive()
        return self._comm

    @property
    def timeout(self) -> float | None:
        """Time limit of every operation, in seconds; None for none."""
        return self._submission.limit

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the time limit of every later operation. See :func:`mpidist.set_timeout`."""
        self._submission.limit = seconds(timeout)

    @property
    def freed(self) -> bool:
        """True once the group was destroyed."""
        return self._submission.freed

    def free(self) -> None:
        """Collective. Destroy the group; every later operation raises ValueError.

        Raises:
            ValueError: The group was destroyed before, or the members have called different
                collectives since the last comparison.
        """
        self._submission.free()

    def abort(self) -> None:
        """Refuse every later operation, without the other members.

        Pending operations stay pending. The communicator is not released.
        """
        self._submission.abort()

    # Reductions

    @overload
    def all_reduce(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def all_reduce(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None: ...
    def all_reduce(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce an array over all members. See :func:`mpidist.all_reduce`."""
        record = self._gpu_op("all_reduce", [array], (array, op), op) if self._uses_gpus else None
        if record is None:
            buffer, mpi_op, finish = to_reduce(array, op, self._size)
            record = Op("all_reduce", self._info, None, buffer, mpi_op, -1, 0, finish)
        return self._submit(record, async_op, [array])

    @overload
    def all_reduce_coalesced(
        self, arrays: Sequence[Any], op: ReduceOpLike = ReduceOp.SUM, *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def all_reduce_coalesced(
        self, arrays: Sequence[Any], op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None: ...
    def all_reduce_coalesced(
        self, arrays: Sequence[Any], op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce several arrays in place. See :func:`mpidist.all_reduce_coalesced`."""
        ops = []
        for array in arrays:
            buffer, mpi_op, finish = to_reduce(array, op, self._size)
            ops.append(Op("all_reduce", self._info, None, buffer, mpi_op, -1, 0, finish))
        work = submit_coalesced(self._submission, "all_reduce_coalesced", ops, async_op)
        return work and work.then(lambda _: list(arrays))

    @overload
    def reduce(
        self,
        array: Any,
        dst: int | None = None,
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        async_op: Literal[True],
        group_dst: int | None = None,
    ) -> Work: ...
    @overload
    def reduce(
        self,
        array: Any,
        dst: int | None = None,
        op: ReduceOpLike = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None: ...
    def reduce(
        self,
        array: Any,
        dst: int | None = None,
        op: ReduceOpLike = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Collective. Reduce an array to one member, in place. See :func:`mpidist.reduce`."""
        root = self._peer("dst", dst, group_dst)
        record = None
        if self._uses_gpus:
            record = self._gpu_op("reduce", [array], (array, None, op, False, root), op, root)
        if record is None:
            is_root = self._rank == root
            buffer, mpi_op, finish = to_reduce(array, op, self._size, write=is_root)
            send, recv = (None, buffer) if is_root else (buffer, None)
            record = Op("reduce", self._info, send, recv, mpi_op, root, 0, finish)
        return self._submit(record, async_op, [array])

    @overload
    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOpLike = ReduceOp.SUM,
        *,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOpLike = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None: ...
    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: ReduceOpLike = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. Reduce a list of arrays. Each member receives one of the results.

        See :func:`mpidist.reduce_scatter`.
        """
        if type(op) is str:
            op = NAMED.get(op, op)
        rows = as_single_buffer(input_list, output, self._size)
        if rows is not None and is_direct(rows.dtype, op):
            record = Op("reduce_scatter", self._info, rows, output, cast("ReduceOp", op))
            return self._submit(record, async_op, [output])
        target, inputs = host_view(output, read=False), host_views(input_list)
        self._check_list("reduce_scatter", inputs, target)
        source = copy_if_overlapping(flatten(inputs), target)
        return self._reduce_scatter(target, source, op, async_op, output)

    @overload
    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: ReduceOpLike = ReduceOp.SUM, *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None: ...
    def reduce_scatter_tensor(
        self, output: Any, input: Any, op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce an array over all members. Each member receives one part.

        See :func:`mpidist.reduce_scatter_tensor`.
        """
        if self._uses_gpus:
            args = output, input, op
            record = self._gpu_op("reduce_scatter_tensor", [output, input], args, op)
            if record is not None:
                return self._submit(record, async_op, [output])
        target, source = host_view(output, read=False), host_view(input)
        self._check_multiple("reduce_scatter_tensor", source, target)
        source = copy_if_overlapping(source, target)
        return self._reduce_scatter(target, source, op, async_op, output)

    @overload
    def scan(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def scan(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None: ...
    def scan(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce an array over this and all lower ranks, in place (MPI 4.1, 6.11).

        Args:
            array: Writable, with the same shape and dtype on all members.
            op: The reduction or its name; not AVG or PREMUL_SUM.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        return self._scan("scan", array, op, async_op)

    @overload
    def exscan(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def exscan(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None: ...
    def exscan(
        self, array: Any, op: ReduceOpLike = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce an array over all lower ranks, as :meth:`scan` (MPI 4.1, 6.11.2).

        The array of group rank 0 keeps its values.
        """
        return self._scan("exscan", array, op, async_op)

    # Data movement

    @overload
    def broadcast(
        self,
        array: Any,
        src: int | None = None,
        *,
        async_op: Literal[True],
        group_src: int | None = None,
    ) -> Work: ...
    @overload
    def broadcast(
        self,
        array: Any,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None: ...
    def broadcast(
        self,
        array: Any,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Collective. Copy the array of one member to all. See :func:`mpidist.broadcast`."""
        root = self._peer("src", src, group_src)
        record = None
        if self._uses_gpus:
            record = self._gpu_op("broadcast", [array], (array, None, False, root), root=root)
        if record is None:
            buffer, finish = as_mpi_buffer(array, write=self._rank != root)
            record = Op("broadcast", self._info, None, buffer, root=root, finish=finish)
        return self._submit(record, async_op, [array])

    @overload
    def all_gather(
        self, array_list: Sequence[Any], array: Any, *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def all_gather(
        self, array_list: Sequence[Any], array: Any, async_op: bool = False
    ) -> Work | None: ...
    def all_gather(
        self, array_list: Sequence[Any], array: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. Gather an array of every member in a list. See :func:`mpidist.all_gather`."""
        record = self._gather_op("all_gather", array_list, array)
        return self._submit(record, async_op, array_list)

    @overload
    def all_gather_into_tensor(
        self, output: Any, input: Any, *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def all_gather_into_tensor(
        self, output: Any, input: Any, async_op: bool = False
    ) -> Work | None: ...
    def all_gather_into_tensor(
        self, output: Any, input: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. Gather the arrays of all members in one array.

        See :func:`mpidist.all_gather_into_tensor`.
        """
        if self._uses_gpus:
            record = self._gpu_op("all_gather_into_tensor", [output, input], (output, input))
            if record is not None:
                return self._submit(record, async_op, [output])
        target, own = host_view(output, read=False), host_view(input)
        self._check_multiple("all_gather_into_tensor", target, own)
        gathered, finish = as_mpi_buffer(target, write=True)
        if own.nbytes >= MIN_MESSAGE_BYTES:
            rows = self._equal_parts(gathered)
            row = rows[self._rank]
            part = row if shares_start(own, row) else as_mpi_input(copy_if_overlapping(own, target))
            given = dict.fromkeys(range(self._size), part)
            record = self._op_of_parts("all_gather", given, dict(enumerate(rows)), finish)
        else:
            part = as_mpi_input(copy_if_overlapping(own, target))
            record = Op("all_gather", self._info, part, gathered, finish=finish)
        return self._submit(record, async_op, [output])

    @overload
    def all_gather_coalesced(
        self,
        output_lists: Sequence[Sequence[Any]],
        inputs: Sequence[Any],
        *,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], async_op: bool = False
    ) -> Work | None: ...
    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Collective. Gather several arrays of all members.

        See :func:`mpidist.all_gather_coalesced`.
        """
        if len(output_lists) != self._size:
            raise ValueError(
                f"all_gather_coalesced of group {self.name!r} needs {self._size} lists of outputs, "
                f"not {len(output_lists)}"
            )
        for rank, outputs in enumerate(output_lists):
            if len(outputs) != len(inputs):
                raise ValueError(
                    f"all_gather_coalesced of {len(inputs)} arrays cannot write into the "
                    f"{len(outputs)} of group rank {rank}"
                )
        with coalesce(self._submission, "all_gather_coalesced", async_op) as begun:
            for number, array in enumerate(inputs):
                self.all_gather([outputs[number] for outputs in output_lists], array)
        return begun.work and begun.work.then(lambda _: [list(one) for one in output_lists])

    def all_gather_ragged(self, array: Any) -> list[Array]:
        """Collective. Return the arrays of all members, whatever their shapes.

        torch has no such function.

        Args:
            array: Same dtype on all members.

        Returns:
            New arrays, by group rank.

        Raises:
            ValueError: The dtypes differ; on all members.
        """
        own = host_view(array)
        facts = self._objects.all_gather((own.dtype, own.shape))
        if any(dtype != own.dtype for dtype, _ in facts):
            raise ValueError(
                f"all_gather_ragged of group {self.name!r} needs one dtype, not "
                f"{[str(dtype) for dtype, _ in facts]} by group rank"
            )
        outputs = [np.empty(shape, own.dtype) for _, shape in facts]
        if sum(as_mpi_input(output).size for output in outputs) > LARGEST_COUNT:
            # More than one call of MPI can count.
            given = dict.fromkeys(range(self._size), as_mpi_input(own))
            taken = {rank: as_mpi_input(output) for rank, output in enumerate(outputs)}
            record = self._op_of_parts("all_gather", given, taken, None)
            record.recv_counts = [output.size for output in outputs]
        else:
            memory, finish = flat_output(outputs)
            gathered = as_mpi_input(memory)
            record = Op("all_gather_v", self._info, as_mpi_input(own), gathered, finish=finish)
            record.recv_counts = [output.nbytes // gathered.itemsize for output in outputs]
        self._submission.submit_for_result(record, continues=True)
        return outputs

    @overload
    def gather(
        self,
        array: Any,
        gather_list: Sequence[Any] | None = None,
        dst: int | None = None,
        *,
        async_op: Literal[True],
        group_dst: int | None = None,
    ) -> Work: ...
    @overload
    def gather(
        self,
        array: Any,
        gather_list: Sequence[Any] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None: ...
    def gather(
        self,
        array: Any,
        gather_list: Sequence[Any] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Collective. Gather the arrays of all members on one. See :func:`mpidist.gather`."""
        root = self._peer("dst", dst, group_dst, default=0)
        outputs = self._list_of_root("gather_list", gather_list, root)
        if outputs is not None:
            record = self._gather_op("gather", outputs, array, root)
            return self._submit(record, async_op, outputs)
        part = as_mpi_input(host_view(array))
        if part.nbytes >= MIN_MESSAGE_BYTES:
            record = self._op_of_parts("gather", {root: part}, {}, None, root)
        else:
            record = Op("gather", self._info, part, root=root)
        return self._submit(record, async_op, ())

    @overload
    def scatter(
        self,
        array: Any,
        scatter_list: Sequence[Any] | None = None,
        src: int | None = None,
        *,
        async_op: Literal[True],
        group_src: int | None = None,
    ) -> Work: ...
    @overload
    def scatter(
        self,
        array: Any,
        scatter_list: Sequence[Any] | None = None,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None: ...
    def scatter(
        self,
        array: Any,
        scatter_list: Sequence[Any] | None = None,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Collective. Give each member one array of a list. See :func:`mpidist.scatter`."""
        root = self._peer("src", src, group_src, default=0)
        inputs = self._list_of_root("scatter_list", scatter_list, root)
        return self._submit(self._scatter_op(inputs, array, root), async_op, [array])

    @overload
    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None: ...
    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Collective. Exchange an array with every member. See :func:`mpidist.all_to_all`."""
        for kind, arrays in (("output", output_list), ("input", input_list)):
            if len(arrays) != self._size:
                raise ValueError(
                    f"all_to_all of group {self.name!r} needs {self._size} {kind} arrays, not "
                    f"{len(arrays)}"
                )
        given, taken, finish = input_list, output_list, None
        are_direct = all_direct(given, taken)
        if not are_direct:
            taken, given = host_views(output_list, read=False), host_views(input_list)
            dtype = given[0].dtype
            if any(array.dtype != dtype for array in (*taken, *given)):
                kinds = sorted({str(array.dtype) for array in (*taken, *given)})
                raise ValueError(f"all_to_all needs arrays of one dtype, not {kinds}")
        self._check_own_part(given[self._rank].size, taken[self._rank].size)
        if not are_direct:
            given, taken, finish = as_mpi_parts(given, taken)
        parts = dict(enumerate(given)), dict(enumerate(taken))
        return self._submit(self._op_of_parts("all_to_all", *parts, finish), async_op, output_list)

    @overload
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None: ...
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. Exchange rows of an array with every member.

        See :func:`mpidist.all_to_all_single`.
        """
        unequal = are_given(input_split_sizes) or are_given(output_split_sizes)
        if self._uses_gpus and not unequal:
            record = self._gpu_op("all_to_all_single", [output, input], (output, input))
            if record is not None:
                return self._submit(record, async_op, [output])
        target, source = host_view(output, read=False), host_view(input)
        if target.dtype != source.dtype:
            raise ValueError(f"all_to_all_single of {source.dtype} cannot write {target.dtype}")
        send = as_mpi_input(copy_if_overlapping(source, target))
        recv, finish = as_mpi_buffer(target, write=True)
        if unequal:
            # An array that MPI has no type for, or cannot reach by its type, moves as bytes.
            given_unit = source.itemsize // send.itemsize
            taken_unit = target.itemsize // recv.itemsize
            given_counts = self._counts_of_rows("input", source, input_split_sizes)
            taken_counts = self._counts_of_rows("output", target, output_split_sizes)
            self._check_own_part(given_counts[self._rank], taken_counts[self._rank])
            given = _slices(send, given_counts, given_unit)
            taken = _slices(recv, taken_counts, taken_unit)
        else:
            self._equal_rows("input", source)
            self._equal_rows("output", target)
            if source.size != target.size:
                raise ValueError(
                    f"all_to_all_single in equal parts needs as many elements of output as of "
                    f"input, not {target.size} and {source.size}"
                )
            if send.size <= LARGEST_COUNT:
                record = Op("all_to_all", self._info, send, recv, finish=finish)
                return self._submit(record, async_op, [output])
            given, taken = self._equal_parts(send), self._equal_parts(recv)
        parts = dict(enumerate(given)), dict(enumerate(taken))
        return self._submit(self._op_of_parts("all_to_all", *parts, finish), async_op, [output])

    # Barriers

    @overload
    def barrier(self, *, async_op: Literal[True], timeout: Timeout = None) -> Work: ...
    @overload
    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None: ...
    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Collective. Wait until all members have entered. See :func:`mpidist.barrier`."""
        record = Op("barrier", self._info)
        record.limit = seconds(timeout)
        return self._submit(record, async_op, [])

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Collective. Run a barrier that names late ranks.

        See :func:`mpidist.monitored_barrier`.
        """
        limit = seconds(timeout)
        limit = self.timeout if limit is None else limit
        self._monitored_barrier.run(_MONITOR_S if limit is None else limit, wait_all_ranks)

    # Messages

    def send(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> None:
        """Point to point. Send an array to a member. See :func:`mpidist.send`."""
        self._submission.run_message(self._send_op(array, dst, tag, group_dst))

    def recv(
        self,
        array: Any,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        timeout: Timeout = None,
    ) -> int:
        """Point to point. Receive an array and return the sender. See :func:`mpidist.recv`.

        ``timeout`` is the time limit of this call, in seconds or as a timedelta.
        """
        record = self._recv_op(array, src, tag, group_src, timeout)
        return self.ranks[self._submission.run_message(record)]

    def isend(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> Work:
        """Point to point. Start to send an array to a member. See :func:`mpidist.isend`."""
        return self._submission.start_message(self._send_op(array, dst, tag, group_dst))

    def irecv(
        self, array: Any, src: int | None = None, tag: int = 0, group_src: int | None = None
    ) -> Work:
        """Point to point. Start to receive an array. See :func:`mpidist.irecv`."""
        return self._submission.start_message(self._recv_op(array, src, tag, group_src))

    def begin_messages(self, messages: Sequence[tuple[str, Any, int, int]]) -> list[Work]:
        """Point to point. Start several messages, or none if an argument is wrong.

        Args:
            messages: Tuples of ``"isend"`` or ``"irecv"``, array, world rank of the peer, and tag.

        Returns:
            A Work for each.
        """
        ops = [
            (self._send_op if name == "isend" else self._recv_op)(array, peer, tag)
            for name, array, peer, tag in messages
        ]
        return [self._submission.start_message(op) for op in ops]

    # Objects. They are pickled: only ranks that you trust may be members.

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        """Collective. Gather an object of every member. See :func:`mpidist.all_gather_object`."""
        if len(object_list) != self._size:
            raise ValueError(
                f"all_gather_object of group {self.name!r} needs a list of {self._size}, not "
                f"{len(object_list)}"
            )
        object_list[:] = self._objects.all_gather(obj)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group_dst: int | None = None,
    ) -> None:
        """Collective. Gather objects on one member. See :func:`mpidist.gather_object`."""
        root = self._peer("dst", dst, group_dst, default=0)
        self._list_of_root("object_gather_list", object_gather_list, root)
        objects = self._objects.gather(obj, root)
        if object_gather_list is not None and objects is not None:
            object_gather_list[:] = objects

    def broadcast_object_list(
        self, object_list: list[Any], src: int | None = None, group_src: int | None = None
    ) -> None:
        """Collective. Copy a list of objects to all. See :func:`mpidist.broadcast_object_list`."""
        root = self._peer("src", src, group_src, default=0)
        objects = self._objects.broadcast(object_list, root)
        if len(objects) != len(object_list):
            raise ValueError(
                f"broadcast_object_list of group {self.name!r} brings {len(objects)} objects, and "
                f"the list of rank {self.ranks[self._rank]} has {len(object_list)}"
            )
        object_list[:] = objects

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: int | None = None,
        group_src: int | None = None,
    ) -> None:
        """Collective. Give each member one object. See :func:`mpidist.scatter_object_list`."""
        root = self._peer("src", src, group_src, default=0)
        if not scatter_object_output_list:
            raise ValueError("scatter_object_output_list needs one entry to write to")
        # Other ranks may give a list, as scripts for torch do.
        inputs = scatter_object_input_list if self._rank == root else None
        given = self._list_of_root("scatter_object_input_list", inputs, root)
        scatter_object_output_list[0] = self._objects.scatter(given, root)

    def send_object_list(
        self, object_list: Sequence[Any], dst: int | None = None, group_dst: int | None = None
    ) -> None:
        """Point to point. Send objects to a member. See :func:`mpidist.send_object_list`."""
        data = dump(list(object_list))
        self.send(block_of(data), dst, group_dst=group_dst)
        if exceeds_block(len(data)):
            self.send(as_array(data), dst, group_dst=group_dst)

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, group_src: int | None = None
    ) -> int:
        """Point to point. Receive objects. See :func:`mpidist.recv_object_list`."""
        block = np.empty(BLOCK_BYTES, np.uint8)
        sender = self.recv(block, src, group_src=group_src)
        (length,), (data,) = split_blocks(block)
        if exceeds_block(length):
            whole = np.empty(length, np.uint8)
            self.recv(whole, sender)
            data = whole.data
        objects = load(data)
        if len(objects) != len(object_list):
            raise ValueError(
                f"rank {sender} has sent {len(objects)} objects, and the list that receives them "
                f"has {len(object_list)}"
            )
        object_list[:] = objects
        return sender

    # Several operations

    def coalesce(self, async_ops: bool = False) -> AbstractContextManager[Coalescing]:
        """Collective. Start the collectives of a ``with`` block together, at its end.

        See :func:`mpidist.coalescing_manager`.
        """
        name = f"coalesced operations of group {self.name!r}"
        return coalesce(self._submission, name, async_ops)

    def prepare(self, name: str, *args: Any, **kwargs: Any) -> Prepared:
        """Return one operation that is checked once and repeated.

        A repetition takes as long as the call of MPI. It matches plain calls of the same operation
        on other members.

        Args:
            name: One of :attr:`repeatable`, ``"send"`` or ``"recv"``.
            args: Its arguments, except ``async_op``.
            kwargs: Its keyword arguments, except ``async_op``.

        Returns:
            The operation. Call it, or ``start()`` it.

        Raises:
            ValueError: There is no such operation, or it would work on copies of its arrays,
                because they are strided or of a type that MPI does not reduce.

        Example:
            >>> import numpy as np
            >>> import mpidist as dist
            >>> group = dist.init_process_group()
            >>> gradient = np.empty(3)
            >>> reduce_gradient = group.prepare("all_reduce", gradient)
            >>> for step in range(2):
            ...     gradient[:] = step
            ...     reduce_gradient()
            >>> gradient
            array([1., 1., 1.])
        """
        if "async_op" in kwargs:
            raise TypeError("prepare takes no async_op: call the result, or start() it")
        if name in ("send", "recv"):
            op = (self._send_op if name == "send" else self._recv_op)(*args, **kwargs)
            call = partial(self._submit_message, op)
        elif name in self.repeatable:
            op = self._op_on_host(name, *args, **kwargs)
            call = partial(self._submit, op)
            if self.gpu_rule.backend == "ipc":
                # Members that call it plainly tell each other first where their arrays lie.
                call = partial(getattr(self, name), *args, **kwargs)
        else:
            raise ValueError(
                f"{name!r} cannot be prepared, but {', '.join(self.repeatable)}, send and recv can"
            )
        check_repeatable(op, (*args, *kwargs.values()))
        return Prepared(op, call)

    # Inside

    def _gpu_op(
        self,
        name: str,
        arrays: Sequence[Any],
        args: tuple[Any, ...],
        op: Reduction | str = ReduceOp.SUM,
        root: int = -1,
    ) -> Op | None:
        """Return a collective for the backend of GPUs; None if MPI runs it on host memory.

        Args:
            name: The method.
            arrays: The array that receives and, if it is another, the array that is read.
            args: The arguments of the method that make the same operation on host memory.
            op: The reduction or its name.
            root: Group rank of the root; -1 if there is none.
        """
        if self._submission.is_collecting():
            return None
        if self.gpu_rule.backend == "mpi":
            return device_memory_op(self._info, name, arrays[0], op, root)
        assert self.device is not None
        stage = partial(self._op_on_host, name, *args)
        return gpu_op(self._info, self.gpu_rule, self.device, name, arrays, op, root, stage)

    def _op_on_host(self, name: str, *args: Any, **kwargs: Any) -> Op:
        """Return a collective on host memory, without submitting it."""
        with self._submission.collecting() as ops:
            getattr(self, name)(*args, **kwargs)
        (op,) = ops
        return op

    def _peer(
        self, name: str, rank: int | None, group_rank: int | None, default: int | None = None
    ) -> int:
        """Return the group rank of the root or peer, from either argument that names it."""
        if rank is not None and group_rank is not None:
            raise ValueError(f"give {name}, a world rank, or group_{name}, a group rank, not both")
        if rank is not None:
            position = self._group_rank.get(rank, -1)
        elif group_rank is not None:
            position = int(index(group_rank))
            position = position if 0 <= position < self._size else -1
        elif default is not None:
            return default
        else:
            raise ValueError(
                f"{name}, the rank of the other side, is missing: give {name} or group_{name}"
            )
        if position < 0:
            given = f"world rank {rank!r}" if rank is not None else f"group rank {group_rank!r}"
            raise ValueError(
                f"{name}: {given} is not in group {self.name!r}, whose ranks are {self.ranks}"
            )
        return position

    def _reduce_scatter(
        self, target: Array, source: Array, op: Reduction | str, async_op: bool, output: Any
    ) -> Work | None:
        send, recv, mpi_op, finish = to_reduce_into(source, target, op, self._size)
        record = Op("reduce_scatter", self._info, send, recv, mpi_op, finish=finish)
        return self._submit(record, async_op, [output])

    def _scan(self, name: str, array: Any, op: Reduction | str, async_op: bool) -> Work | None:
        kind = ReduceOp.of(op)
        if kind.name in ("AVG", "PREMUL_SUM"):
            raise ValueError(f"{name} has no {kind.name}: divide, or multiply, by itself")
        buffer, mpi_op, finish = to_reduce(array, kind, self._size)
        send = None
        if name == "exscan" and self._rank == 0:  # MPI may write anything there
            send, buffer, finish = buffer, np.empty_like(buffer), None
        record = Op(name, self._info, send, buffer, mpi_op, finish=finish)
        return self._submit(record, async_op, [array])

    def _op_of_parts(
        self,
        name: str,
        given: Mapping[int, Array],
        taken: Mapping[int, Array],
        finish: OnComplete,
        root: int = -1,
    ) -> Op:
        """Return an operation of parts, by the group rank that receives or sends them."""
        record = Op(name, self._info, root=root, finish=finish)
        record.send_parts, record.recv_parts = given, taken
        return record

    def _gather_op(self, name: str, outputs: Sequence[Any], array: Any, root: int = -1) -> Op:
        """Return an operation that receives an array of every member into a list of arrays.

        Large arrays are messages of their own. Small ones are gathered in one buffer.

        Args:
            name: ``"all_gather"`` or ``"gather"``.
            outputs: The arrays that receive.
            array: The array of this rank.
            root: Group rank of the receiver; -1 for all members.
        """
        whole = as_single_buffer(outputs, array, self._size)
        if whole is not None and array.nbytes < MIN_MESSAGE_BYTES:
            return Op(name, self._info, array, whole, ReduceOp.SUM, root)
        rows, part, finish = outputs, array, None
        if whole is None and not (
            getattr(array, "nbytes", 0) >= MIN_MESSAGE_BYTES
            and len(outputs) == self._size
            and all_direct((array,), outputs)
            and not [other for other in outputs if other.shape != array.shape]
        ):
            views, own = host_views(outputs, read=False), host_view(array)
            self._check_list(name, views, own)
            if own.nbytes < MIN_MESSAGE_BYTES:
                memory, finish = flat_output(views)
                part = as_mpi_input(copy_if_overlapping(own, memory))
                memory = as_mpi_input(memory)
                return Op(name, self._info, part, memory, root=root, finish=finish)
            check_outputs(views)
            rows, finish = flat_buffers(views, write=True)
            part = rows[self._rank]
            if not shares_start(own, part):
                part = as_mpi_input(copy_overlapping_inputs([own], rows)[0])
        given = dict.fromkeys(range(self._size) if root < 0 else (root,), part)
        return self._op_of_parts(name, given, dict(enumerate(rows)), finish, root)

    def _scatter_op(self, inputs: Sequence[Any] | None, array: Any, root: int) -> Op:
        """Return an operation that gives each member an array of the root's list.

        Args:
            inputs: The arrays to send; None except on the root.
            array: The array of this rank, which receives.
            root: Group rank of the root.
        """
        whole = as_single_buffer(inputs, array, self._size)
        if whole is not None and array.nbytes < MIN_MESSAGE_BYTES:
            return Op("scatter", self._info, whole, array, ReduceOp.SUM, root)
        parts, part, finish = inputs, array, None
        if whole is None:
            own = host_view(array, read=False)
            views = [] if inputs is None else host_views(inputs)
            if inputs is not None:
                self._check_list("scatter", views, own)
            if own.nbytes < MIN_MESSAGE_BYTES:
                send = as_mpi_input(copy_if_overlapping(flatten(views), own)) if views else None
                recv, finish = as_mpi_buffer(own, write=True)
                return Op("scatter", self._info, send, recv, root=root, finish=finish)
            parts, (part,), finish = as_mpi_parts(views, [own])
        given = dict(enumerate(parts or ()))
        return self._op_of_parts("scatter", given, {root: part}, finish, root)

    def _list_of_root(
        self, name: str, entries: Sequence[Any] | None, root: int
    ) -> Sequence[Any] | None:
        """Return the list that only the root gives, one entry for each member; None elsewhere."""
        if self._rank != root:
            if entries is not None and len(entries):
                raise ValueError(
                    f"{name} is only for the root, rank {self.ranks[root]}; leave it None on rank "
                    f"{self.ranks[self._rank]}"
                )
            return None
        if entries is None:
            raise ValueError(f"{name} is missing on the root, rank {self.ranks[root]}")
        if len(entries) != self._size:
            raise ValueError(
                f"{name} of group {self.name!r} needs {self._size} entries, not {len(entries)}"
            )
        return entries

    def _check_list(self, name: str, arrays: Sequence[Array], like: Array) -> None:
        """Raise ValueError unless a list has one array for each member, all like another array."""
        if len(arrays) != self._size:
            raise ValueError(
                f"{name} of group {self.name!r} needs {self._size} arrays, not {len(arrays)}"
            )
        shape, dtype = like.shape, like.dtype
        for rank, array in enumerate(arrays):
            if array.shape != shape or (array.dtype is not dtype and array.dtype != dtype):
                raise ValueError(
                    f"{name} of {like.dtype}{list(like.shape)} has {array.dtype}"
                    f"{list(array.shape)} in its list for group rank {rank}"
                )

    def _check_multiple(self, name: str, whole: Array, part: Array) -> None:
        """Raise ValueError unless one array is as large as one other for each member."""
        if whole.dtype is not part.dtype and whole.dtype != part.dtype:
            raise ValueError(f"{name} needs one dtype, not {whole.dtype} and {part.dtype}")
        if whole.size != self._size * part.size:
            raise ValueError(
                f"{name} of group {self.name!r} needs {self._size} times as many elements on one "
                f"side as on the other, not {whole.size} and {part.size}"
            )

    def _equal_parts(self, whole: Array) -> list[Array]:
        """Return a contiguous array as one flat part for each member."""
        return list(whole.reshape(self._size, -1))

    def _equal_rows(self, kind: str, array: Array) -> int:
        """Return the number of rows for each member, where all have the same."""
        length = array.shape[0] if array.ndim else 1
        if length % self._size:
            raise ValueError(
                f"all_to_all_single cannot divide {length} rows of {kind} among the "
                f"{self._size} members of group {self.name!r}: give {kind}_split_sizes"
            )
        return length // self._size

    def _counts_of_rows(self, kind: str, array: Array, splits: Sequence[int] | None) -> list[int]:
        """Return the number of elements for each member."""
        length = array.shape[0] if array.ndim else 1
        if not are_given(splits):
            splits = [self._equal_rows(kind, array)] * self._size
        if len(splits) != self._size or min(splits) < 0 or sum(splits) != length:
            raise ValueError(
                f"{kind}_split_sizes of {list(splits)} do not divide {length} rows among the "
                f"{self._size} members of group {self.name!r}"
            )
        row = array.size // length if length else 0
        return [int(split) * row for split in splits]

    def _check_own_part(self, given: int, taken: int) -> None:
        """Check the part that a rank sends to itself, which is no message that MPI would check."""
        if given != taken:
            raise ValueError(
                f"rank {self.ranks[self._rank]} of group {self.name!r} has {given} elements for "
                f"itself in its input, but {taken} in its output"
            )

    def _send_op(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> Op:
        peer = self._peer("dst", dst, group_dst)
        self._check_not_self(peer, "send to")
        _check_tag(tag)
        buffer = self._memory_for_mpi(array, write=False)
        if buffer is None:
            buffer, _ = as_mpi_buffer(array, write=False)
        return Op("send", self._info, buffer, None, root=peer, tag=tag)

    def _recv_op(
        self,
        array: Any,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        timeout: Timeout = None,
    ) -> Op:
        peer = self._peer("src", src, group_src, default=-1)
        self._check_not_self(peer, "receive from")
        _check_tag(tag)
        finish = None
        buffer = self._memory_for_mpi(array, write=True)
        if buffer is None:
            # A view with its values: elements beyond a shorter message keep theirs.
            buffer, finish = as_mpi_buffer(host_view(array), write=True)
        record = Op("recv", self._info, None, buffer, root=peer, tag=tag, finish=finish)
        record.limit = seconds(timeout)
        return record

    def _memory_for_mpi(self, array: Any, *, write: bool) -> Any:
        """Return the memory of an array on a GPU if MPI is to take it, else None."""
        if self.gpu_rule.backend != "mpi" or array.__class__ is np.ndarray:
            return None
        return device_memory(array, write=write)

    def _check_not_self(self, peer: int, verb: str) -> None:
        if peer == self._rank:
            raise ValueError(f"rank {self.ranks[peer]} cannot {verb} itself")

    def _submit_message(self, op: Op, async_op: bool) -> Work | None:
        if async_op:
            return self._submission.start_message(op)
        self._submission.run_message(op)
        return None


def are_given(splits: Sequence[int] | None) -> TypeGuard[Sequence[int]]:
    """Return whether split sizes are given. As in torch, an empty list means None."""
    return splits is not None and len(splits) > 0


def _check_tag(tag: int) -> None:
    if tag < 0 or tag in RESERVED_TAGS:
        raise ValueError(
            f"tag {tag} cannot be used: negative ones have no meaning, and those from "
            f"{RESERVED_TAGS[0]} to {RESERVED_TAGS[-1]} are the library's own"
        )


def _slices(array: Array, counts: Sequence[int], unit: int) -> list[Array]:
    """Return consecutive slices of an array, flat, of ``unit * count`` elements each."""
    flat, parts, start = array.reshape(-1), [], 0
    for count in counts:
        parts.append(flat[start : start + unit * count])
        start += unit * count
    return parts
