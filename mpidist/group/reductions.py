"""Operations in which values of several ranks become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpidist.array_lists import collect, host_views, rows_like
from mpidist.arrays import Array, apart, host_view
from mpidist.group.checks import check_list, check_multiple
from mpidist.group.coalescing import begin_together, returning
from mpidist.group.core import Core
from mpidist.op import Op
from mpidist.reduce_op import ReduceOp, Reduction, is_direct, to_reduce, to_reduce_into
from mpidist.work import Work


class Reductions(Core):
    """all_reduce and its relatives.

    The types of all: numbers and bools; float16, bfloat16 and float8 reduce in float32, bool by
    logic, AVG and PREMUL_SUM need a floating or complex dtype. All raise TypeError where the dtype
    cannot be reduced so, ValueError where a result is to be written into a read-only array,
    DeadlineExceededError when the group's time limit passes, and GroupBrokenError while an earlier
    operation of the group is past its limit, and pending.
    """

    _waste: Array | None = None

    def all_reduce(
        self, array: Any, op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce ``array`` over all members, in place on each.

        Args:
            array: Same shape and dtype on all members; float16, bfloat16 and float8 reduce in
                float32, bool by logic.
            op: The reduction; AVG needs a floating or complex dtype.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            TypeError: The dtype cannot be reduced so.
            ValueError: The array is read-only.
            DeadlineExceededError: The group's time limit passed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        buffer, mpi_op, finish = to_reduce(array, op, self._size)
        return self.submit(
            Op("all_reduce", self, None, buffer, mpi_op, -1, 0, finish), async_op, [array]
        )

    def reduce(
        self,
        array: Any,
        dst: int | None = None,
        op: Reduction | str = ReduceOp.SUM,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Collective. Reduce ``array`` over all members into the root's; the others keep theirs.

        Args:
            array: See :meth:`all_reduce`; need not be writable but on the root.
            dst: World rank of the root.
            op: The reduction.
            async_op: Return at once.
            group_dst: Group rank of the root, in place of ``dst``.

        Returns:
            A Work if ``async_op``, else None. Raises as :meth:`all_reduce`; ValueError, too, where
            the root is missing or not a member.
        """
        root = self._peer("dst", dst, group_dst)
        is_root = self._rank == root
        buffer, mpi_op, finish = to_reduce(array, op, self._size, write=is_root)
        send, recv = (None, buffer) if is_root else (buffer, None)
        return self.submit(
            Op("reduce", self, send, recv, mpi_op, root, 0, finish), async_op, [array]
        )

    def all_reduce_coalesced(
        self, arrays: Sequence[Any], op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce several arrays in place; see :meth:`mpidist.ProcessGroup.coalesce`.

        Args:
            arrays: The same shapes and dtypes, in the same order, on all members.
            op: The reduction.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None. Raises as :meth:`all_reduce`.
        """
        ops = []
        for array in arrays:
            buffer, mpi_op, finish = to_reduce(array, op, self._size)
            ops.append(Op("all_reduce", self, None, buffer, mpi_op, -1, 0, finish))
        return returning(begin_together(self, "all_reduce_coalesced", ops, async_op), list(arrays))

    def reduce_scatter(
        self,
        output: Any,
        input_list: Sequence[Any],
        op: Reduction | str = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. Reduce the n-th arrays of all members into the n-th member's ``output``.

        Args:
            output: Writable, of the shape and dtype of one array of the list.
            input_list: One array a member, all of one shape and dtype, the same on all.
            op: The reduction.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None. Raises as :meth:`all_reduce`; ValueError, too, where
            the list has another length, or an array another shape or dtype.
        """
        rows = rows_like(input_list, output, self._size)
        if rows is not None and is_direct(rows.dtype, op):
            record = Op("reduce_scatter", self, rows, output, cast("ReduceOp", op))
            return self.submit(record, async_op, [output])
        target, inputs = host_view(output, read=False), host_views(input_list)
        check_list(self, "reduce_scatter", inputs, target)
        source = apart(collect(inputs), target)
        return self._reduce_scatter(target, source, op, async_op, output)

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: Reduction | str = ReduceOp.SUM,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. Reduce ``input`` over all members; each keeps its part.

        Args:
            output: Writable; receives as many elements as it has.
            input: One part a member, one behind the other in C order; same dtype.
            op: The reduction.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None. Raises as :meth:`all_reduce`; ValueError, too, where
            the sizes do not fit.
        """
        target, source = host_view(output, read=False), host_view(input)
        check_multiple(self, "reduce_scatter_tensor", source, target)
        return self._reduce_scatter(target, apart(source, target), op, async_op, output)

    def scan(
        self, array: Any, op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce over this and all lower ranks, in place (MPI 4.1, 6.11).

        Args:
            array: Same shape and dtype on all members.
            op: The reduction, but AVG and PREMUL_SUM.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None. Raises as :meth:`all_reduce`.
        """
        return self._scan("scan", array, op, async_op)

    def exscan(
        self, array: Any, op: Reduction | str = ReduceOp.SUM, async_op: bool = False
    ) -> Work | None:
        """Collective. Reduce over all lower ranks, in place; rank 0 keeps what it has.

        Arguments, result and errors as :meth:`scan` (MPI 4.1, 6.11.2).
        """
        return self._scan("exscan", array, op, async_op)

    # Inside

    def _reduce_scatter(
        self, target: Array, source: Array, op: Reduction | str, async_op: bool, output: Any
    ) -> Work | None:
        send, recv, mpi_op, finish = to_reduce_into(source, target, op, self._size)
        record = Op("reduce_scatter", self, send, recv, mpi_op, finish=finish)
        return self.submit(record, async_op, [output])

    def _scan(self, name: str, array: Any, op: Reduction | str, async_op: bool) -> Work | None:
        kind = ReduceOp.of(op)
        if kind.name in ("AVG", "PREMUL_SUM"):
            raise ValueError(f"{name} has no {kind.name}: divide, or multiply, by itself")
        buffer, mpi_op, finish = to_reduce(array, kind, self._size)
        send = None
        if name == "exscan" and self._rank == 0:  # MPI may write anything there
            send, buffer, finish = buffer, self._to_waste(buffer, async_op), None
        return self.submit(Op(name, self, send, buffer, mpi_op, finish=finish), async_op, [array])

    def _to_waste(self, like: Array, async_op: bool) -> Array:
        """Memory for what nobody reads. One after the other use the same: new memory is slow."""
        if async_op or self._collecting or self._timeout is not None:
            return np.empty_like(like)
        if self._waste is None or self._waste.nbytes < like.nbytes:
            self._waste = np.empty(like.nbytes, np.uint8)
        return self._waste[: like.nbytes].view(like.dtype)
