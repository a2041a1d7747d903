"""Operations that move data between all members, and change none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from mpidist.array_lists import (
    apart_lists,
    are_plain_and_apart,
    check_outputs,
    collect,
    flat,
    flat_parts,
    host_views,
    spread,
)
from mpidist.arrays import Array, Finish, apart, host_view, movable, to_move
from mpidist.group.checks import check_list, check_multiple, list_of_root
from mpidist.group.coalescing import coalesce
from mpidist.group.core import Core
from mpidist.op import Op
from mpidist.work import Timeout, Work, seconds


class Moves(Core):
    """broadcast, gather, scatter, all_to_all and their relatives, and barrier.

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
        root = self._peer("src", src, group_src, default=0)
        buffer, finish = to_move(array, write=self._rank != root)
        record = Op("broadcast", self, None, buffer, root=root, finish=finish)
        return self.submit(record, async_op)

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
        outputs, own = host_views(array_list), host_view(array)
        check_list(self, "all_gather", outputs, own)
        memory, finish = spread(outputs)
        part, gathered = movable(apart(own, memory)), movable(memory)
        return self.submit(Op("all_gather", self, part, gathered, finish=finish), async_op)

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
        target, own = host_view(output), host_view(input)
        check_multiple(self, "all_gather_into_tensor", target, own)
        part = movable(apart(own, target))
        gathered, finish = to_move(target, write=True)
        return self.submit(Op("all_gather", self, part, gathered, finish=finish), async_op)

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
        return together.work

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
        outputs = list_of_root(self, "gather_list", gather_list, root)
        own = host_view(array)
        if outputs is None:
            return self.submit(Op("gather", self, movable(own), root=root), async_op)
        check_list(self, "gather", outputs, own)
        memory, finish = spread(outputs)
        part = movable(apart(own, memory))
        record = Op("gather", self, part, movable(memory), root=root, finish=finish)
        return self.submit(record, async_op)

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
        inputs = list_of_root(self, "scatter_list", scatter_list, root)
        own = host_view(array)
        parts = None
        if inputs is not None:
            check_list(self, "scatter", inputs, own)
            parts = movable(apart(collect(inputs), own))
        part, finish = to_move(own, write=True)
        return self.submit(Op("scatter", self, parts, part, root=root, finish=finish), async_op)

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
        outputs, inputs = host_views(output_list), host_views(input_list)
        for what, arrays in (("output", outputs), ("input", inputs)):
            if len(arrays) != self._size:
                raise ValueError(
                    f"all_to_all of group {self.name!r} needs {self._size} {what} arrays, not "
                    f"{len(arrays)}"
                )
        dtype = inputs[0].dtype
        if [a for a in (*outputs, *inputs) if a.dtype is not dtype and a.dtype != dtype]:
            kinds = sorted({str(array.dtype) for array in (*outputs, *inputs)})
            raise ValueError(f"all_to_all needs arrays of one dtype, not {kinds}")
        self._check_own(inputs[self._rank].size, outputs[self._rank].size)
        if are_plain_and_apart(inputs, outputs):
            return self._exchange(flat(inputs), flat(outputs), None, async_op)
        check_outputs(outputs)
        given, _ = flat_parts(apart_lists(inputs, outputs), write=False)
        taken, finish = flat_parts(outputs, write=True)
        return self._exchange(given, taken, finish, async_op)

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
            input_split_sizes: How many rows go to each member; without, equally many. If one
                member gives sizes, all must, also where they are equal.
            async_op: Return at once.

        Returns:
            A Work if ``async_op``, else None.
        """
        target, source = host_view(output), host_view(input)
        if target.dtype != source.dtype:
            raise ValueError(f"all_to_all_single of {source.dtype} cannot write {target.dtype}")
        send = movable(apart(source, target))
        recv, finish = to_move(target, write=True)
        if _are_given(input_split_sizes) or _are_given(output_split_sizes):
            unit = source.itemsize // send.itemsize  # dtypes that MPI does not know are bytes
            gives = self._rows("input", source, input_split_sizes)
            takes = self._rows("output", target, output_split_sizes)
            self._check_own(gives[self._rank], takes[self._rank])
            given, taken = _stretches(send, gives, unit), _stretches(recv, takes, unit)
            return self._exchange(given, taken, finish, async_op)
        self._equal_rows("input", source)
        self._equal_rows("output", target)
        if source.size != target.size:
            raise ValueError(
                f"all_to_all_single in equal parts needs as many elements of output as of input, "
                f"not {target.size} and {source.size}"
            )
        return self.submit(Op("all_to_all", self, send, recv, finish=finish), async_op)

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
        record = Op("barrier", self)
        record.limit = seconds(timeout)
        return self.submit(record, async_op)

    # Inside

    def _equal_rows(self, what: str, array: Array) -> int:
        """How many rows of an array belong to each member, where all have equally many."""
        length = array.shape[0] if array.ndim else 1
        if length % self._size:
            raise ValueError(
                f"all_to_all_single cannot divide {length} rows of {what} among the "
                f"{self._size} members of group {self.name!r}: give {what}_split_sizes"
            )
        return length // self._size

    def _rows(self, what: str, array: Array, splits: Sequence[int] | None) -> list[int]:
        """How many elements of an array belong to each member."""
        length = array.shape[0] if array.ndim else 1
        if not _are_given(splits):
            splits = [self._equal_rows(what, array)] * self._size
        if len(splits) != self._size or min(splits) < 0 or sum(splits) != length:
            raise ValueError(
                f"{what}_split_sizes of {list(splits)} do not divide {length} rows among the "
                f"{self._size} members of group {self.name!r}"
            )
        row = array.size // length if length else 0
        return [int(split) * row for split in splits]

    def _check_own(self, given: int, taken: int) -> None:
        """What a rank gives itself is no message, whose length MPI would look at."""
        if given != taken:
            raise ValueError(
                f"rank {self.ranks[self._rank]} of group {self.name!r} has {given} elements for "
                f"itself in what it gives, but {taken} in what it receives"
            )

    def _exchange(
        self, given: Sequence[Array], taken: Sequence[Array], finish: Finish, async_op: bool
    ) -> Work | None:
        """Parts of any sizes, one a member."""
        record = Op("all_to_all_v", self, finish=finish)
        record.send_parts, record.recv_parts = given, taken
        return self.submit(record, async_op)


def _stretches(array: Array, counts: Sequence[int], unit: int) -> list[Array]:
    """An array, flat, in stretches of so many elements of a number of units."""
    flat, parts, start = array.reshape(-1), [], 0
    for count in counts:
        parts.append(flat[start : start + unit * count])
        start += unit * count
    return parts


def _are_given(splits: Sequence[int] | None) -> TypeGuard[Sequence[int]]:
    """Whether split sizes are given; an empty list says as little as None, as torch has it."""
    return splits is not None and len(splits) > 0
