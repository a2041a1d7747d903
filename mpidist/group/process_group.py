"""The process group: ranks that act together, with every operation as a method."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, cast

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
    Reduction,
    is_direct,
    to_reduce,
    to_reduce_into,
)
from mpidist.config import config
from mpidist.gpu import bus_id
from mpidist.gpu.nccl import nccl_problem
from mpidist.group.checks import check_list, check_multiple, list_of_root, list_of_root_objects
from mpidist.group.coalescing import Coalescing, coalesce, launch_coalesced, returning
from mpidist.group.gpu_operation import (
    MOVING,
    REDUCING,
    device_memory,
    device_memory_op,
    gpu_op,
)
from mpidist.group.gpu_rule import IPC_MIN_BYTES, GpuFacts, GpuRule, choose
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

    Methods have the names and the meaning of torch.distributed's functions: ``src`` and ``dst``
    are ranks of the world, ``group_src`` and ``group_dst`` ranks of the group, and results are
    written into the arrays given. Arrays are NumPy arrays, or anything with DLPack, the CUDA array
    interface or the buffer protocol, with any strides.

    Operations that move data take any dtype without Python objects. Reductions take numbers and
    bools: float16, bfloat16 and float8 reduce in float32, bool reduces by logic, integers wrap
    around as NumPy's do, and AVG and PREMUL_SUM need a floating or complex dtype. An input that
    shares memory with an output is copied first.

    Without a time limit an operation blocks inside MPI, and the watchdog reports a stall. With a
    limit it polls, and raises DeadlineExceededError when the limit passes. The operation then stays
    pending, and the group refuses others until it has completed. All members must make the same
    choice, of ``async_op`` too: MPI does not match blocking calls with others (MPI 4.1, 6.12).

    Every operation raises:
        DeadlineExceededError: The time limit of the group passed.
        DistBackendError: MPI failed.
        GroupBrokenError: The group cannot go on after an earlier operation.
        TypeError: An array is of a type or dtype that the operation does not take.
        ValueError: A receiving array is read-only; a shape, size, dtype or root does not fit; or
            the members call different collectives. The first 100 collectives of a group are
            compared, and later every 256th, with all since the last comparison.

    Args:
        comm: The communicator; the group owns it from now on.
        name: Used in messages.
        timeout: Time limit of every operation, in seconds or as a timedelta; None for none.
        device: Index of the GPU of this rank. None stages arrays on GPUs through the host.

    Attributes:
        name: Used in messages.
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
        self,
        comm: MPI.Intracomm,
        name: str,
        timeout: Timeout = None,
        device: int | None = None,
    ) -> None:
        from mpi4py import MPI

        if comm == MPI.COMM_NULL or comm.Is_inter():
            raise ValueError(
                f"group {name!r} needs a communicator of which this rank is a member, and of one "
                "group: not COMM_NULL, nor an intercommunicator"
            )
        here = world()
        self._comm = comm
        with watched(f"making group {name!r}", comm.Get_group()):
            gpu = None if device is None else (bus_id(device), nccl_problem())
            own = next(_counter) * here.size + here.rank, config.debug, config.gpu_mpi, gpu
            told = comm.allgather(own)
        number, debug, gpu_mpi, _ = told[0]  # the settings of one rank serve all
        group = comm.Get_group()
        translated = group.Translate_ranks(list(range(comm.size)), here.comm.Get_group())
        group.Free()
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
        self._discarded: Array | None = None

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
        """Set the time limit of every later operation.

        Args:
            timeout: Seconds or a timedelta; None for none.
        """
        self._submission.limit = seconds(timeout)

    @property
    def freed(self) -> bool:
        """True once the group was destroyed."""
        return self._submission.freed

    def free(self) -> None:
        """Collective. Destroy the group; every later operation raises ValueError.

        Raises:
            ValueError: The group was destroyed before.
        """
        self._submission.free()

    # Reductions

    def all_reduce(
        self, array: Any, op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce an array over all members, in place on each.

        Args:
            array: Same shape and dtype on all members.
            op: The reduction or its name; AVG needs a floating or complex dtype.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        if self._uses_gpus:
            record = self._gpu_op("all_reduce", [array], (array, op), op)
            if record is not None:
                return self._submit(record, async_op, [array])
        buffer, mpi_op, finish = to_reduce(array, op, self._size)
        return self._submit(
            Op("all_reduce", self._info, None, buffer, mpi_op, -1, 0, finish), async_op, [array]
        )

    def reduce(
        self,
        array: Any,
        dst: int | None = None,
        op: Reduction | str = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Collective. Reduce an array over all members into the array of the root.

        The arrays of the other members keep their values.

        Args:
            array: Same shape and dtype on all members; writable on the root.
            dst: World rank of the root.
            op: The reduction or its name.
            async_op: Return a Work instead of waiting for the result.
            group_dst: Group rank of the root, in place of ``dst``.

        Returns:
            A Work if ``async_op``, else None.
        """
        root = self._peer("dst", dst, group_dst)
        if self._uses_gpus:
            record = self._gpu_op("reduce", [array], (array, None, op, False, root), op, root)
            if record is not None:
                return self._submit(record, async_op, [array])
        is_root = self._rank == root
        buffer, mpi_op, finish = to_reduce(array, op, self._size, write=is_root)
        send, recv = (None, buffer) if is_root else (buffer, None)
        return self._submit(
            Op("reduce", self._info, send, recv, mpi_op, root, 0, finish), async_op, [array]
        )

    def all_reduce_coalesced(
        self, arrays: Sequence[Any], op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce several arrays in place; see :meth:`coalesce`.

        Args:
            arrays: The same shapes and dtypes, in the same order, on all members.
            op: The reduction or its name.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        ops = []
        for array in arrays:
            buffer, mpi_op, finish = to_reduce(array, op, self._size)
            ops.append(Op("all_reduce", self._info, None, buffer, mpi_op, -1, 0, finish))
        work = launch_coalesced(self._submission, "all_reduce_coalesced", ops, async_op)
        return returning(work, list(arrays))

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: Reduction | str = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. Reduce the n-th arrays of all members into the output of group rank n.

        Args:
            output: Writable, with the shape and dtype of one array of the list.
            input_list: One array for each member, all of one shape and dtype on all members.
            op: The reduction or its name.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        if type(op) is str:
            op = NAMED.get(op, op)
        rows = as_single_buffer(input_list, output, self._size)
        if rows is not None and is_direct(rows.dtype, op):
            record = Op("reduce_scatter", self._info, rows, output, cast("ReduceOp", op))
            return self._submit(record, async_op, [output])
        target, inputs = host_view(output, read=False), host_views(input_list)
        check_list(self._info, "reduce_scatter", inputs, target)
        source = copy_if_overlapping(flatten(inputs), target)
        return self._reduce_scatter(target, source, op, async_op, output)

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: Reduction | str = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. Reduce an array over all members; each receives its part.

        Args:
            output: Writable; receives as many elements as it has.
            input: One part for each member, in C order; same dtype as ``output``.
            op: The reduction or its name.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        if self._uses_gpus:
            args = output, input, op
            record = self._gpu_op("reduce_scatter_tensor", [output, input], args, op)
            if record is not None:
                return self._submit(record, async_op, [output])
        target, source = host_view(output, read=False), host_view(input)
        check_multiple(self._info, "reduce_scatter_tensor", source, target)
        return self._reduce_scatter(
            target, copy_if_overlapping(source, target), op, async_op, output
        )

    def scan(
        self, array: Any, op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce an array over this and all lower ranks, in place (MPI 4.1, 6.11).

        Args:
            array: Same shape and dtype on all members.
            op: The reduction or its name; not AVG or PREMUL_SUM.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        return self._scan("scan", array, op, async_op)

    def exscan(
        self, array: Any, op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce an array over all lower ranks, in place (MPI 4.1, 6.11.2).

        The array of group rank 0 keeps its values.

        Args:
            array: Same shape and dtype on all members.
            op: The reduction or its name; not AVG or PREMUL_SUM.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        return self._scan("exscan", array, op, async_op)

    # Data movement

    def broadcast(
        self,
        array: Any,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Collective. Copy the array of the root to all members.

        Args:
            array: Same shape and dtype on all members; writable except on the root.
            src: World rank of the root.
            async_op: Return a Work instead of waiting for the result.
            group_src: Group rank of the root, in place of ``src``.

        Returns:
            A Work if ``async_op``, else None.
        """
        root = self._peer("src", src, group_src)
        if self._uses_gpus:
            record = self._gpu_op("broadcast", [array], (array, None, False, root), root=root)
            if record is not None:
                return self._submit(record, async_op, [array])
        buffer, finish = as_mpi_buffer(array, write=self._rank != root)
        record = Op("broadcast", self._info, None, buffer, root=root, finish=finish)
        return self._submit(record, async_op, [array])

    def all_gather(
        self, array_list: Sequence[Any], array: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. Collect the arrays of all members in a list, by group rank.

        Args:
            array_list: One writable array for each member, with the shape and dtype of ``array``.
            array: Same shape and dtype on all members.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        rows = as_single_buffer(array_list, array, self._size)
        if rows is not None:
            if array.nbytes < MIN_MESSAGE_BYTES:
                record = Op("all_gather", self._info, array, rows)
                return self._submit(record, async_op, array_list)
            return self._all_gather_parts(array, array_list, None, async_op, array_list)
        if (
            len(array_list) == self._size
            and all_direct((array,), array_list)
            and array.nbytes >= MIN_MESSAGE_BYTES
            and not [other for other in array_list if other.shape != array.shape]
        ):
            return self._all_gather_parts(array, array_list, None, async_op, array_list)
        outputs, own = host_views(array_list, read=False), host_view(array)
        check_list(self._info, "all_gather", outputs, own)
        if own.nbytes >= MIN_MESSAGE_BYTES:
            part, taken, finish = self._parts_to_gather(own, outputs)
            return self._all_gather_parts(part, taken, finish, async_op, array_list)
        memory, finish = flat_output(outputs)
        part, gathered = as_mpi_input(copy_if_overlapping(own, memory)), as_mpi_input(memory)
        return self._submit(
            Op("all_gather", self._info, part, gathered, finish=finish), async_op, array_list
        )

    def all_gather_into_tensor(
        self, output: Any, input: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. Collect the arrays of all members in one array, by group rank.

        Args:
            output: Writable, with one part for each member in C order, of the dtype of ``input``.
            input: Same shape and dtype on all members.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        if self._uses_gpus:
            record = self._gpu_op("all_gather_into_tensor", [output, input], (output, input))
            if record is not None:
                return self._submit(record, async_op, [output])
        target, own = host_view(output, read=False), host_view(input)
        check_multiple(self._info, "all_gather_into_tensor", target, own)
        gathered, finish = as_mpi_buffer(target, write=True)
        if own.nbytes >= MIN_MESSAGE_BYTES:
            rows = self._equal_parts(gathered)
            row = rows[self._rank]
            part = row if shares_start(own, row) else as_mpi_input(copy_if_overlapping(own, target))
            return self._all_gather_parts(part, rows, finish, async_op, [output])
        part = as_mpi_input(copy_if_overlapping(own, target))
        return self._submit(
            Op("all_gather", self._info, part, gathered, finish=finish), async_op, [output]
        )

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Collective. Collect several arrays of every member.

        Args:
            output_lists: For each member, by group rank, one writable array for each input.
            inputs: The same shapes and dtypes on all members.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
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
        return returning(begun.work, [list(outputs) for outputs in output_lists])

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
            record = Op("all_gather", self._info)  # more than one call of MPI can count
            record.send_parts = dict.fromkeys(range(self._size), as_mpi_input(own))
            record.recv_parts = {rank: as_mpi_input(output) for rank, output in enumerate(outputs)}
            record.recv_counts = [output.size for output in outputs]
        else:
            memory, finish = flat_output(outputs)
            gathered = as_mpi_input(memory)
            record = Op("all_gather_v", self._info, as_mpi_input(own), gathered, finish=finish)
            record.recv_counts = [output.nbytes // gathered.itemsize for output in outputs]
        self._submission.submit_for_result(record, continues=True)
        return outputs

    def gather(
        self,
        array: Any,
        gather_list: Sequence[Any] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Collective. Collect the arrays of all members on the root, by group rank.

        Args:
            array: Same shape and dtype on all members.
            gather_list: On the root one writable array for each member, like ``array``; else None.
            dst: World rank of the root; by default the first member.
            async_op: Return a Work instead of waiting for the result.
            group_dst: Group rank of the root, in place of ``dst``.

        Returns:
            A Work if ``async_op``, else None.
        """
        root = self._peer("dst", dst, group_dst, default=0)
        receivers = gather_list or ()
        if gather_list is not None and self._rank == root:
            rows = as_single_buffer(gather_list, array, self._size)
            if rows is not None:
                if array.nbytes < MIN_MESSAGE_BYTES:
                    record = Op("gather", self._info, array, rows, root=root)
                    return self._submit(record, async_op, receivers)
                taken = dict(enumerate(gather_list))
                return self._exchange(
                    "gather", {root: array}, taken, None, async_op, receivers, root
                )
        outputs = list_of_root(self._info, "gather_list", gather_list, root, read=False)
        own = host_view(array)
        if outputs is None:
            part = as_mpi_input(own)
            if part.nbytes >= MIN_MESSAGE_BYTES:
                return self._exchange("gather", {root: part}, {}, None, async_op, receivers, root)
            return self._submit(Op("gather", self._info, part, root=root), async_op, receivers)
        check_list(self._info, "gather", outputs, own)
        if own.nbytes >= MIN_MESSAGE_BYTES:
            part, parts, finish = self._parts_to_gather(own, outputs)
            taken = dict(enumerate(parts))
            return self._exchange("gather", {root: part}, taken, finish, async_op, receivers, root)
        memory, finish = flat_output(outputs)
        part = as_mpi_input(copy_if_overlapping(own, memory))
        record = Op("gather", self._info, part, as_mpi_input(memory), root=root, finish=finish)
        return self._submit(record, async_op, receivers)

    def scatter(
        self,
        array: Any,
        scatter_list: Sequence[Any] | None = None,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Collective. Give each member its array of the root's list, by group rank.

        Args:
            array: Writable; receives. Same shape and dtype on all members.
            scatter_list: On the root one array for each member, like ``array``; else None.
            src: World rank of the root; by default the first member.
            async_op: Return a Work instead of waiting for the result.
            group_src: Group rank of the root, in place of ``src``.

        Returns:
            A Work if ``async_op``, else None.
        """
        root = self._peer("src", src, group_src, default=0)
        if scatter_list is not None and self._rank == root:
            rows = as_single_buffer(scatter_list, array, self._size)
            if rows is not None:
                if array.nbytes < MIN_MESSAGE_BYTES:
                    record = Op("scatter", self._info, rows, array, root=root)
                    return self._submit(record, async_op, [array])
                given = dict(enumerate(scatter_list))
                return self._exchange(
                    "scatter", given, {root: array}, None, async_op, [array], root
                )
        inputs = list_of_root(self._info, "scatter_list", scatter_list, root, read=True)
        own = host_view(array, read=False)
        if inputs is not None:
            check_list(self._info, "scatter", inputs, own)
        if own.nbytes >= MIN_MESSAGE_BYTES:
            parts, (part,), finish = as_mpi_parts(inputs or [], [own])
            given = dict(enumerate(parts))
            return self._exchange("scatter", given, {root: part}, finish, async_op, [array], root)
        send = None if inputs is None else as_mpi_input(copy_if_overlapping(flatten(inputs), own))
        recv, finish = as_mpi_buffer(own, write=True)
        return self._submit(
            Op("scatter", self._info, send, recv, root=root, finish=finish), async_op, [array]
        )

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Collective. Send the n-th array of a list to group rank n, and receive one from each.

        Args:
            output_list: One writable array for each member, as large as the array it sends.
            input_list: One array for each member; all arrays of both lists have one dtype.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
        """
        for kind, arrays in (("output", output_list), ("input", input_list)):
            if len(arrays) != self._size:
                raise ValueError(
                    f"all_to_all of group {self.name!r} needs {self._size} {kind} arrays, not "
                    f"{len(arrays)}"
                )
        if all_direct(input_list, output_list):
            self._check_own_part(input_list[self._rank].size, output_list[self._rank].size)
            return self._all_to_all(input_list, output_list, None, async_op, output_list)
        outputs, inputs = host_views(output_list, read=False), host_views(input_list)
        dtype = inputs[0].dtype
        if [a for a in (*outputs, *inputs) if a.dtype is not dtype and a.dtype != dtype]:
            kinds = sorted({str(array.dtype) for array in (*outputs, *inputs)})
            raise ValueError(f"all_to_all needs arrays of one dtype, not {kinds}")
        self._check_own_part(inputs[self._rank].size, outputs[self._rank].size)
        return self._all_to_all(*as_mpi_parts(inputs, outputs), async_op, output_list)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. Send each member some rows of an array, and receive rows from each.

        Args:
            output: Writable, with the dtype of ``input`` and rows of the same size.
            input: The rows, along the first dimension.
            output_split_sizes: Number of rows from each member; by default equal. If one member
                gives sizes, all must, also where they are equal.
            input_split_sizes: Number of rows for each member; by default equal.
            async_op: Return a Work instead of waiting for the result.

        Returns:
            A Work if ``async_op``, else None.
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
            return self._all_to_all(given, taken, finish, async_op, [output])
        self._equal_rows("input", source)
        self._equal_rows("output", target)
        if source.size != target.size:
            raise ValueError(
                f"all_to_all_single in equal parts needs as many elements of output as of input, "
                f"not {target.size} and {source.size}"
            )
        if send.size > LARGEST_COUNT:
            given, taken = self._equal_parts(send), self._equal_parts(recv)
            return self._all_to_all(given, taken, finish, async_op, [output])
        record = Op("all_to_all", self._info, send, recv, finish=finish)
        return self._submit(record, async_op, [output])

    # Barriers

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Collective. Return once all members have entered.

        Args:
            async_op: Return a Work instead of waiting for the result.
            timeout: Time limit of this barrier, in seconds or as a timedelta.

        Returns:
            A Work if ``async_op``, else None.
        """
        record = Op("barrier", self._info)
        record.limit = seconds(timeout)
        return self._submit(record, async_op, [])

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Collective. Run a barrier that names the ranks that do not come in time.

        Group rank 0 waits for a message from each other member and tells all of them which ranks
        are late, so all fail together. If rank 0 itself is late, the others notice after twice the
        time. A late rank is told that it is late.

        Args:
            timeout: Seconds or a timedelta; by default the group's, or 30 minutes.
            wait_all_ranks: Name all missing ranks instead of the first.

        Raises:
            DeadlineExceededError: A rank did not come in time; on every rank.
        """
        limit = seconds(timeout)
        limit = self.timeout if limit is None else limit
        self._monitored_barrier.run(_MONITOR_S if limit is None else limit, wait_all_ranks)

    # Messages

    def send(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> None:
        """Point to point. Send an array to a member.

        Args:
            array: The data.
            dst: World rank of the receiver.
            tag: The receiver must give the same.
            group_dst: Group rank of the receiver, in place of ``dst``.
        """
        self._submission.run_message(self._send_op(array, dst, tag, group_dst))

    def recv(
        self,
        array: Any,
        src: int | None = None,
        tag: int = 0,
        group_src: int | None = None,
        timeout: Timeout = None,
    ) -> int:
        """Point to point. Receive an array from a member.

        Args:
            array: Writable, with the dtype and size of the sender's. If the message is shorter, the
                rest keeps its values (not of arrays beyond 2^31 elements).
            src: World rank of the sender; by default any member.
            tag: The sender must give the same.
            group_src: Group rank of the sender, in place of ``src``.
            timeout: Time limit of this call, in seconds or as a timedelta.

        Returns:
            World rank of the sender.
        """
        record = self._recv_op(array, src, tag, group_src, timeout)
        return self.ranks[self._submission.run_message(record)]

    def isend(
        self, array: Any, dst: int | None = None, tag: int = 0, group_dst: int | None = None
    ) -> Work:
        """Point to point. Start to send an array to a member.

        Args:
            array: The data; it must not change before the Work ends.
            dst: World rank of the receiver.
            tag: The receiver must give the same.
            group_dst: Group rank of the receiver, in place of ``dst``.

        Returns:
            A Work.
        """
        return self._submission.start_message(self._send_op(array, dst, tag, group_dst))

    def irecv(
        self, array: Any, src: int | None = None, tag: int = 0, group_src: int | None = None
    ) -> Work:
        """Point to point. Start to receive an array from a member.

        Args:
            array: Writable, as for :meth:`recv`; not to be used before the Work ends.
            src: World rank of the sender; by default any member.
            tag: The sender must give the same.
            group_src: Group rank of the sender, in place of ``src``.

        Returns:
            A Work; its result is the world rank of the sender.
        """
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

    # Objects

    def all_gather_object(self, object_list: list[Any], obj: Any) -> None:
        """Collective. Collect the objects of all members in a list, by group rank.

        Objects are pickled: only ranks that you trust may be members.

        Args:
            object_list: One entry for each member; they are replaced.
            obj: The object of this rank.
        """
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
        """Collective. Collect the objects of all members on the root, by group rank.

        Objects are pickled: only ranks that you trust may be members.

        Args:
            obj: The object of this rank.
            object_gather_list: On the root one entry for each member, which is replaced; else None.
            dst: World rank of the root; by default the first member.
            group_dst: Group rank of the root, in place of ``dst``.
        """
        root = self._peer("dst", dst, group_dst, default=0)
        name = "object_gather_list"
        target = list_of_root_objects(self._info, name, object_gather_list, root)
        objects = self._objects.gather(obj, root)
        if target is not None and objects is not None:
            target[:] = objects

    def broadcast_object_list(
        self, object_list: list[Any], src: int | None = None, group_src: int | None = None
    ) -> None:
        """Collective. Replace the objects of every member's list by the root's objects.

        Objects are pickled: only ranks that you trust may be members.

        Args:
            object_list: As long as the root's.
            src: World rank of the root; by default the first member.
            group_src: Group rank of the root, in place of ``src``.
        """
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
        """Collective. Give each member its object of the root's list, by group rank.

        Objects are pickled: only ranks that you trust may be members.

        Args:
            scatter_object_output_list: Its first entry is replaced.
            scatter_object_input_list: On the root one object for each member; else not used.
            src: World rank of the root; by default the first member.
            group_src: Group rank of the root, in place of ``src``.
        """
        root = self._peer("src", src, group_src, default=0)
        if not scatter_object_output_list:
            raise ValueError("scatter_object_output_list needs one entry to write to")
        # Other ranks may give a list, as scripts for torch do.
        inputs = scatter_object_input_list if self._rank == root else None
        given = list_of_root_objects(self._info, "scatter_object_input_list", inputs, root)
        scatter_object_output_list[0] = self._objects.scatter(given, root)

    def send_object_list(
        self, object_list: Sequence[Any], dst: int | None = None, group_dst: int | None = None
    ) -> None:
        """Point to point. Send objects to a member.

        Args:
            object_list: The objects.
            dst: World rank of the receiver.
            group_dst: Group rank of the receiver, in place of ``dst``.
        """
        data = dump(list(object_list))
        self.send(block_of(data), dst, group_dst=group_dst)
        if exceeds_block(len(data)):
            self.send(as_array(data), dst, group_dst=group_dst)

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, group_src: int | None = None
    ) -> int:
        """Point to point. Receive objects into a list.

        Objects are pickled: receive only from ranks that you trust.

        Args:
            object_list: As long as the sender's; its entries are replaced.
            src: World rank of the sender; by default any member.
            group_src: Group rank of the sender, in place of ``src``.

        Returns:
            World rank of the sender.
        """
        block = np.empty(BLOCK_BYTES, np.uint8)
        sender = self.recv(block, src, group_src=group_src)
        (length,), (data,) = split_blocks(block, 1)
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
        """Collective. Start all collectives that a ``with`` block calls together, at its end.

        Small operations of one kind, dtype and root become one (up to 256 KiB each; broadcasts of
        any dtype). The others follow in order. A call in the block returns None. Arrays have
        their results after the block, or after ``wait()``::

            with group.coalesce(async_ops=True) as begun:
                for gradient in gradients:
                    group.all_reduce(gradient)
            begun.wait()

        No operation of the block may use memory that another one writes, and no array may change in
        the block. All members must call the same in the same order. Messages are not collected.
        Operations on objects and all_gather_ragged raise ValueError. If the block raises, none
        starts.

        Args:
            async_ops: End the block at once. ``wait()`` of the object that the block binds, or its
                ``work``, tells when the operations have ended.
        """
        name = f"coalesced operations of group {self.name!r}"
        return coalesce(self._submission, name, async_ops)

    def prepare(self, name: str, *args: Any, **kwargs: Any) -> Prepared:
        """Return one operation that is checked once and repeated.

        A repetition takes as long as the call of MPI. It matches plain calls of the same operation
        on other members::

            reduce_gradient = group.prepare("all_reduce", gradient)
            for batch in batches:
                gradient[:] = ...
                reduce_gradient()

        Args:
            name: One of :attr:`repeatable`, ``"send"`` or ``"recv"``.
            args: Its arguments, except ``async_op``.
            kwargs: Its keyword arguments, except ``async_op``.

        Returns:
            The operation: call it, or ``start()`` it.

        Raises:
            ValueError: There is no such operation, or it would work on copies of its arrays,
                because they are strided or of a type that MPI does not reduce.
        """
        if "async_op" in kwargs:
            raise TypeError("prepare takes no async_op: call the result, or start() it")
        submit: Callable[[Op, bool], Any]
        if name in ("send", "recv"):
            make = self._send_op if name == "send" else self._recv_op
            op = make(*args, **kwargs)
            submit = self._submit_message
        elif name in self.repeatable:
            with self._submission.collecting() as ops:
                getattr(self, name)(*args, **kwargs)
            (op,) = ops
            submit = self._repeating(name, op, args, kwargs)
        else:
            raise ValueError(
                f"{name!r} cannot be prepared, but {', '.join(self.repeatable)}, send and recv can"
            )
        check_repeatable(op, (*args, *kwargs.values()))
        return Prepared(op, submit)

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
        stage = partial(self._op_on_host, name, args)
        return gpu_op(self._info, self.gpu_rule, self.device, name, arrays, op, root, stage)

    def _op_on_host(self, name: str, args: tuple[Any, ...]) -> Op:
        """Return a collective on host memory, without submitting it."""
        with self._submission.collecting() as ops:
            getattr(self, name)(*args)
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
            send, buffer, finish = buffer, self._discard(buffer, async_op), None
        record = Op(name, self._info, send, buffer, mpi_op, finish=finish)
        return self._submit(record, async_op, [array])

    def _discard(self, like: Array, async_op: bool) -> Array:
        """Return memory for a result that is not used. Blocking calls share it to save time."""
        if async_op or self._submission.is_collecting() or self.timeout is not None:
            return np.empty_like(like)
        if self._discarded is None or self._discarded.nbytes < like.nbytes:
            self._discarded = np.empty(like.nbytes, np.uint8)
        return self._discarded[: like.nbytes].view(like.dtype)

    def _exchange(
        self,
        name: str,
        given: Mapping[int, Array],
        taken: Mapping[int, Array],
        finish: OnComplete,
        async_op: bool,
        outputs: Sequence[Any],
        root: int = -1,
    ) -> Work | None:
        """Submit an operation of parts, by the group rank that receives or sends them."""
        record = Op(name, self._info, root=root, finish=finish)
        record.send_parts, record.recv_parts = given, taken
        return self._submit(record, async_op, outputs)

    def _all_to_all(
        self,
        given: Sequence[Array],
        taken: Sequence[Array],
        finish: OnComplete,
        async_op: bool,
        outputs: Sequence[Any],
    ) -> Work | None:
        """Submit an all_to_all of parts of any sizes, one for each member."""
        parts = dict(enumerate(given)), dict(enumerate(taken))
        return self._exchange("all_to_all", *parts, finish, async_op, outputs)

    def _all_gather_parts(
        self,
        part: Array,
        rows: Sequence[Array],
        finish: OnComplete,
        async_op: bool,
        outputs: Sequence[Any],
    ) -> Work | None:
        """Submit an all_gather of parts that are messages of their own."""
        given = dict.fromkeys(range(self._size), part)
        return self._exchange("all_gather", given, dict(enumerate(rows)), finish, async_op, outputs)

    def _parts_to_gather(
        self, own: Array, rows: Sequence[Array]
    ) -> tuple[Array, list[Array], OnComplete]:
        """Return the part to send, the rows that MPI can write, and a call for after MPI."""
        check_outputs(rows)
        taken, finish = flat_buffers(rows, write=True)
        row = taken[self._rank]
        part = (
            row
            if shares_start(own, row)
            else as_mpi_input(copy_overlapping_inputs([own], taken)[0])
        )
        return part, taken, finish

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

    def _repeating(
        self, name: str, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[Op, bool], Any]:
        """Return a function that runs or starts a prepared collective."""
        arrays = ([op.send], [op.recv], op.send_parts.values(), op.recv_parts.values())
        nbytes = max(sum(one.nbytes for one in some if one is not None) for some in arrays)
        if (
            self.gpu_rule.backend == "ipc"
            and name in (*MOVING, *REDUCING)
            and nbytes >= IPC_MIN_BYTES
        ):
            # Members that call it plainly tell each other first where their arrays lie.
            return lambda _, async_op: getattr(self, name)(*args, **kwargs, async_op=async_op)
        return self._submit


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
