"""Operations that move data between all members, and change none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.array_lists import (
    apart_lists,
    check_outputs,
    collect,
    flat_parts,
    host_views,
    lies_at,
    parts_to_move,
    rows_like,
    spread,
)
from mpidist.arrays import Array, Finish, apart, host_view, movable, to_move
from mpidist.group.checks import check_list, check_multiple, list_of_root
from mpidist.group.coalescing import coalesce, returning
from mpidist.group.exchanges import Exchanges
from mpidist.op import WORTH_A_MESSAGE, Op
from mpidist.work import Work


class Moves(Exchanges):
    """broadcast, gather, scatter and their relatives.

    The types of all: any dtype without Python objects. All raise ValueError where an array is
    read-only but receives, or has not the shape, size or dtype that it should, or where the root
    is not a member; DeadlineExceededError when the group's time limit passes; and GroupBrokenError
    while an earlier operation of the group is past its limit, and pending. What is read may lie
    where results are written; it is copied first.
    """

    def broadcast(
        self,
        array: Any,
        src: int | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        """Collective. Copy the root's ``array`` into every member's.

        Args:
            array: Same shape and dtype on all members; writable but on the root.
            src: World rank of the root.
            async_op: Return at once.
            group_src: Group rank of the root, in place of ``src``.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            ValueError: The array receives but is read-only, or the root is missing or not a member.
            DeadlineExceededError: The group's time limit passed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        root = self._peer("src", src, group_src)
        buffer, finish = to_move(array, write=self._rank != root)
        record = Op("broadcast", self, None, buffer, root=root, finish=finish)
        return self.submit(record, async_op, [array])

    def all_gather(
        self, array_list: Sequence[Any], array: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. Collect every member's ``array`` in ``array_list``, by group rank.

        Args:
            array_list: One writable array a member, of the shape and dtype of ``array``.
            array: Same shape and dtype on all members.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.
        """
        rows = rows_like(array_list, array, self._size)
        if rows is not None:
            if array.nbytes < WORTH_A_MESSAGE:
                return self.submit(Op("all_gather", self, array, rows), async_op, array_list)
            return self._gather_messages(array, array_list, None, async_op, array_list)
        outputs, own = host_views(array_list, read=False), host_view(array)
        check_list(self, "all_gather", outputs, own)
        if own.nbytes >= WORTH_A_MESSAGE:
            part, taken, finish = self._careful_messages(own, outputs)
            return self._gather_messages(part, taken, finish, async_op, array_list)
        memory, finish = spread(outputs)
        part, gathered = movable(apart(own, memory)), movable(memory)
        return self.submit(
            Op("all_gather", self, part, gathered, finish=finish), async_op, array_list
        )

    def all_gather_into_tensor(
        self, output: Any, input: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. Collect every member's ``input`` in ``output``, by group rank.

        Args:
            output: Writable, with one part a member in C order, of the dtype of ``input``.
            input: Same shape and dtype on all members.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.
        """
        target, own = host_view(output, read=False), host_view(input)
        check_multiple(self, "all_gather_into_tensor", target, own)
        gathered, finish = to_move(target, write=True)
        if own.nbytes >= WORTH_A_MESSAGE:
            rows = self._equal_parts(gathered)
            row = rows[self._rank]
            part = row if lies_at(own, row) else movable(apart(own, target))
            return self._gather_messages(part, rows, finish, async_op, [output])
        part = movable(apart(own, target))
        return self.submit(
            Op("all_gather", self, part, gathered, finish=finish), async_op, [output]
        )

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Any]], inputs: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Collective. Collect several arrays of every member.

        Args:
            output_lists: For each member, by group rank, one writable array an input.
            inputs: The same shapes and dtypes on all members.
            async_op: Return at once.

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
        with coalesce(self, "all_gather_coalesced", async_op) as together:
            for number, array in enumerate(inputs):
                self.all_gather([outputs[number] for outputs in output_lists], array)
        return returning(together.work, [list(outputs) for outputs in output_lists])

    def gather(
        self,
        array: Any,
        gather_list: Sequence[Any] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        """Collective. Collect every member's ``array`` on the root, by group rank.

        Args:
            array: Same shape and dtype on all members.
            gather_list: On the root one writable array a member, like ``array``; on others None.
            dst: World rank of the root; without it, and without ``group_dst``, the first member.
            async_op: Return at once.
            group_dst: Group rank of the root.

        Returns:
            A Work if ``async_op``, else None.
        """
        root = self._peer("dst", dst, group_dst, default=0)
        if gather_list is not None and self._rank == root:
            rows = rows_like(gather_list, array, self._size)
            if rows is not None:
                if array.nbytes < WORTH_A_MESSAGE:
                    return self.submit(
                        Op("gather", self, array, rows, root=root), async_op, gather_list or ()
                    )
                taken = dict(enumerate(gather_list))
                return self._exchange(
                    "gather", {root: array}, taken, None, async_op, root, gather_list or ()
                )
        outputs = list_of_root(self, "gather_list", gather_list, root, read=False)
        own = host_view(array)
        if outputs is None:
            part = movable(own)
            if part.nbytes >= WORTH_A_MESSAGE:
                return self._exchange(
                    "gather", {root: part}, {}, None, async_op, root, gather_list or ()
                )
            return self.submit(Op("gather", self, part, root=root), async_op, gather_list or ())
        check_list(self, "gather", outputs, own)
        if own.nbytes >= WORTH_A_MESSAGE:
            part, parts, finish = self._careful_messages(own, outputs)
            given, taken = {root: part}, dict(enumerate(parts))
            return self._exchange("gather", given, taken, finish, async_op, root, gather_list or ())
        memory, finish = spread(outputs)
        part = movable(apart(own, memory))
        record = Op("gather", self, part, movable(memory), root=root, finish=finish)
        return self.submit(record, async_op, gather_list or ())

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
            scatter_list: On the root one array a member, like ``array``; on others None.
            src: World rank of the root; without it, and without ``group_src``, the first member.
            async_op: Return at once.
            group_src: Group rank of the root.

        Returns:
            A Work if ``async_op``, else None.
        """
        root = self._peer("src", src, group_src, default=0)
        if scatter_list is not None and self._rank == root:
            rows = rows_like(scatter_list, array, self._size)
            if rows is not None:
                if array.nbytes < WORTH_A_MESSAGE:
                    return self.submit(
                        Op("scatter", self, rows, array, root=root), async_op, [array]
                    )
                given = dict(enumerate(scatter_list))
                return self._exchange(
                    "scatter", given, {root: array}, None, async_op, root, [array]
                )
        inputs = list_of_root(self, "scatter_list", scatter_list, root, read=True)
        own = host_view(array, read=False)
        if inputs is not None:
            check_list(self, "scatter", inputs, own)
        if own.nbytes >= WORTH_A_MESSAGE:
            parts, (part,), finish = parts_to_move(inputs or [], [own])
            given, taken = dict(enumerate(parts)), {root: part}
            return self._exchange("scatter", given, taken, finish, async_op, root, [array])
        send = None if inputs is None else movable(apart(collect(inputs), own))
        recv, finish = to_move(own, write=True)
        return self.submit(
            Op("scatter", self, send, recv, root=root, finish=finish), async_op, [array]
        )

    # Inside

    def _careful_messages(
        self, own: Array, rows: Sequence[Array]
    ) -> tuple[Array, list[Array], Finish]:
        """What is gathered, where to, as MPI can move it, and what is left to do then."""
        check_outputs(rows)
        taken, finish = flat_parts(rows, write=True)
        row = taken[self._rank]
        part = row if lies_at(own, row) else movable(apart_lists([own], taken)[0])
        return part, taken, finish

    def _gather_messages(
        self,
        part: Array,
        rows: Sequence[Array],
        finish: Finish,
        async_op: bool,
        outputs: Sequence[Any],
    ) -> Work | None:
        """all_gather of parts that are messages of their own."""
        given = dict.fromkeys(range(self._size), part)
        return self._exchange(
            "all_gather", given, dict(enumerate(rows)), finish, async_op, outputs=outputs
        )
