"""Operations that move data between all members, and change none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.arrays import Array, Finish, collect, host_view, movable, spread, to_move
from mpidist.group.checks import check_list, check_multiple, list_of_root
from mpidist.group.core import Core
from mpidist.op import Op
from mpidist.work import Timeout, Work, gather_works, seconds


class Moves(Core):
    """broadcast, gather, scatter, all_to_all and their relatives, and barrier.

    The types of all: any dtype without Python objects. All raise ValueError where an array is
    read-only but receives, or has not the shape, size or dtype that it should, or where the root
    is not a member; DeadlineExceededError when the group's time limit passes; and GroupBrokenError
    while an earlier operation of the group is past its limit, and pending.
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
            src: World rank of the root; without it, and without ``group_src``, the first member.
            async_op: Return at once.
            group_src: Group rank of the root.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            ValueError: The array receives but is read-only, or the root is not a member.
            DeadlineExceededError: The group's time limit passed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        root = self._peer(src, group_src, default=0)
        buffer, finish = to_move(array, write=self._rank != root)
        record = Op("broadcast", self, None, buffer, root=root, finish=finish)
        return self._collective(record, async_op)

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
        outputs, own = [host_view(output) for output in array_list], host_view(array)
        check_list(self, "all_gather", outputs, own)
        memory, finish = spread(outputs)
        part, gathered = movable(own), movable(memory)
        return self._collective(Op("all_gather", self, part, gathered, finish=finish), async_op)

    def all_gather_into_tensor(
        self, output: Any, input: Any, async_op: bool = False
    ) -> Work | None:
        """Collective. Collect every member's ``input`` in ``output``, by group rank.

        Args:
            output: Writable, with one part a member in C order, of the dtype of ``input``. May be
                the memory of ``input`` too, where this rank's part lies.
            input: Same shape and dtype on all members.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.
        """
        target, own = host_view(output), host_view(input)
        check_multiple(self, "all_gather_into_tensor", target, own)
        if np.may_share_memory(target, own):
            own = own.copy()
        part = movable(own)
        gathered, finish = to_move(target, write=True)
        return self._collective(Op("all_gather", self, part, gathered, finish=finish), async_op)

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
        works = [
            self.all_gather([outputs[number] for outputs in output_lists], array, async_op)
            for number, array in enumerate(inputs)
        ]
        return gather_works("all_gather_coalesced", [w for w in works if w]) if async_op else None

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
        root = self._peer(dst, group_dst, default=0)
        outputs = list_of_root(self, "gather_list", gather_list, root)
        own = host_view(array)
        part = movable(own)
        if outputs is None:
            return self._collective(Op("gather", self, part, root=root), async_op)
        check_list(self, "gather", outputs, own)
        memory, finish = spread(outputs)
        record = Op("gather", self, part, movable(memory), root=root, finish=finish)
        return self._collective(record, async_op)

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
        root = self._peer(src, group_src, default=0)
        inputs = list_of_root(self, "scatter_list", scatter_list, root)
        own = host_view(array)
        parts = None
        if inputs is not None:
            check_list(self, "scatter", inputs, own)
            parts = movable(collect(inputs))
        part, finish = to_move(own, write=True)
        return self._collective(
            Op("scatter", self, parts, part, root=root, finish=finish), async_op
        )

    def all_to_all(
        self, output_list: Sequence[Any], input_list: Sequence[Any], async_op: bool = False
    ) -> Work | None:
        """Collective. Give the n-th array of the list to member n; receive one from each.

        Args:
            output_list: One writable array a member, as large as what that member gives.
            input_list: One array a member; all arrays of both lists have one dtype.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.
        """
        outputs, inputs = ([host_view(a) for a in arrays] for arrays in (output_list, input_list))
        for what, arrays in (("output", outputs), ("input", inputs)):
            if len(arrays) != self._size:
                raise ValueError(
                    f"all_to_all of group {self.name!r} needs {self._size} {what} arrays, not "
                    f"{len(arrays)}"
                )
        kinds = {array.dtype for array in (*outputs, *inputs)}
        if len(kinds) > 1:
            raise ValueError(f"all_to_all needs arrays of one dtype, not {sorted(map(str, kinds))}")
        given, taken = ([array.size for array in arrays] for arrays in (inputs, outputs))
        memory = (collect(inputs), *spread(outputs))
        return self._exchange(memory, (given, taken), async_op)

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Collective. Give each member a stretch of rows of ``input``; receive one from each.

        Args:
            output: Writable, same dtype as ``input``, and rows of the same size.
            input: The rows, along the first dimension.
            output_split_sizes: How many rows come from each member; without, equally many.
            input_split_sizes: How many rows go to each member; without, equally many.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.
        """
        target, source = host_view(output), host_view(input)
        if target.dtype != source.dtype:
            raise ValueError(f"all_to_all_single of {source.dtype} cannot write {target.dtype}")
        given = self._rows("input", source, input_split_sizes)
        taken = self._rows("output", target, output_split_sizes)
        equal = not (input_split_sizes or output_split_sizes)
        memory = (collect([source]), *spread([target]))
        return self._exchange(memory, None if equal else (given, taken), async_op)

    def barrier(self, async_op: bool = False, timeout: Timeout = None) -> Work | None:
        """Collective. Return once all members have entered.

        Args:
            async_op: Return at once.
            timeout: Time limit of this barrier, in seconds or as a timedelta.

        Returns:
            A Work if ``async_op``, else None.

        Raises:
            DeadlineExceededError: The time limit passed.
            GroupBrokenError: An earlier operation of the group is past its limit, and pending.
        """
        return self._collective(Op("barrier", self), async_op, seconds(timeout))

    # Inside

    def _rows(self, what: str, array: Array, splits: Sequence[int] | None) -> list[int]:
        """How many elements of an array belong to each member."""
        length = array.shape[0] if array.ndim else 1
        if not splits:
            if length % self._size:
                raise ValueError(
                    f"all_to_all_single cannot divide {length} rows of {what} among the "
                    f"{self._size} members of group {self.name!r}: give {what}_split_sizes"
                )
            splits = [length // self._size] * self._size
        if len(splits) != self._size or min(splits) < 0 or sum(splits) != length:
            raise ValueError(
                f"{what}_split_sizes of {list(splits)} do not divide {length} rows among the "
                f"{self._size} members of group {self.name!r}"
            )
        row = array.size // length if length else 0
        return [split * row for split in splits]

    def _exchange(
        self,
        arrays: tuple[Array, Array, Finish],
        counts: tuple[list[int], list[int]] | None,
        async_op: bool,
    ) -> Work | None:
        source, target, finish = arrays
        send, recv = movable(source), movable(target)
        if counts is None:
            return self._collective(Op("all_to_all", self, send, recv, finish=finish), async_op)
        unit = source.itemsize // send.itemsize
        given, taken = ([unit * count for count in side] for side in counts)
        record = Op("all_to_all_v", self, send, recv, finish=finish)
        record.send_counts, record.recv_counts = given, taken
        return self._collective(record, async_op)
