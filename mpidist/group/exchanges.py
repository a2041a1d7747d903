"""Operations in which each member gives every other a part of its own; and barrier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from mpidist.array_lists import are_plain_and_apart, host_views, parts_to_move
from mpidist.arrays import Array, Finish, apart, host_view, movable, to_move
from mpidist.group.core import Core
from mpidist.op import LARGEST_COUNT, Op
from mpidist.work import Timeout, Work, seconds


class Exchanges(Core):
    """all_to_all in its two forms, and barrier.

    Types and errors as of :class:`mpidist.group.moves.Moves`.
    """

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
        for what, arrays in (("output", output_list), ("input", input_list)):
            if len(arrays) != self._size:
                raise ValueError(
                    f"all_to_all of group {self.name!r} needs {self._size} {what} arrays, not "
                    f"{len(arrays)}"
                )
        if are_plain_and_apart(input_list, output_list):
            self._check_own(input_list[self._rank].size, output_list[self._rank].size)
            given, taken = dict(enumerate(input_list)), dict(enumerate(output_list))
            return self._exchange("all_to_all", given, taken, None, async_op, outputs=output_list)
        outputs, inputs = host_views(output_list, read=False), host_views(input_list)
        dtype = inputs[0].dtype
        if [a for a in (*outputs, *inputs) if a.dtype is not dtype and a.dtype != dtype]:
            kinds = sorted({str(array.dtype) for array in (*outputs, *inputs)})
            raise ValueError(f"all_to_all needs arrays of one dtype, not {kinds}")
        self._check_own(inputs[self._rank].size, outputs[self._rank].size)
        return self._exchange_all(*parts_to_move(inputs, outputs), async_op, output_list)

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
        target, source = host_view(output, read=False), host_view(input)
        if target.dtype != source.dtype:
            raise ValueError(f"all_to_all_single of {source.dtype} cannot write {target.dtype}")
        send = movable(apart(source, target))
        recv, finish = to_move(target, write=True)
        if are_given(input_split_sizes) or are_given(output_split_sizes):
            # What MPI has no type for, or cannot reach by it, is moved as bytes.
            gives_unit = source.itemsize // send.itemsize
            takes_unit = target.itemsize // recv.itemsize
            gives = self._rows("input", source, input_split_sizes)
            takes = self._rows("output", target, output_split_sizes)
            self._check_own(gives[self._rank], takes[self._rank])
            given, taken = _stretches(send, gives, gives_unit), _stretches(recv, takes, takes_unit)
            return self._exchange_all(given, taken, finish, async_op, [output])
        self._equal_rows("input", source)
        self._equal_rows("output", target)
        if source.size != target.size:
            raise ValueError(
                f"all_to_all_single in equal parts needs as many elements of output as of input, "
                f"not {target.size} and {source.size}"
            )
        if send.size > LARGEST_COUNT:
            given, taken = self._equal_parts(send), self._equal_parts(recv)
            return self._exchange_all(given, taken, finish, async_op, [output])
        return self.submit(Op("all_to_all", self, send, recv, finish=finish), async_op, [output])

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
        return self.submit(record, async_op, [])

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
        if not are_given(splits):
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

    def _equal_parts(self, whole: Array) -> list[Array]:
        """A contiguous array in one flat part a member."""
        return list(whole.reshape(self._size, -1))

    def _exchange_all(
        self,
        given: Sequence[Array],
        taken: Sequence[Array],
        finish: Finish,
        async_op: bool,
        outputs: Sequence[Any],
    ) -> Work | None:
        """all_to_all of parts of any sizes, one a member."""
        return self._exchange(
            "all_to_all",
            dict(enumerate(given)),
            dict(enumerate(taken)),
            finish,
            async_op,
            outputs=outputs,
        )

    def _exchange(
        self,
        name: str,
        given: Mapping[int, Array],
        taken: Mapping[int, Array],
        finish: Finish,
        async_op: bool,
        root: int = -1,
        outputs: Sequence[Any] | None = None,
    ) -> Work | None:
        """Parts by the group rank to which they go, or from which they come."""
        record = Op(name, self, root=root, finish=finish)
        record.send_parts, record.recv_parts = given, taken
        return self.submit(record, async_op, outputs)


def _stretches(array: Array, counts: Sequence[int], unit: int) -> list[Array]:
    """An array, flat, in stretches of so many elements of a number of units."""
    flat, parts, start = array.reshape(-1), [], 0
    for count in counts:
        parts.append(flat[start : start + unit * count])
        start += unit * count
    return parts


def are_given(splits: Sequence[int] | None) -> TypeGuard[Sequence[int]]:
    """Whether split sizes are given; an empty list says as little as None, as torch has it."""
    return splits is not None and len(splits) > 0
