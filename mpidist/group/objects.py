"""Python objects between members of a group, pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.array_lists import spread
from mpidist.arrays import Array, host_view, movable
from mpidist.group.checks import list_of_root_objects
from mpidist.group.messages import Messages
from mpidist.group.moves import Moves
from mpidist.group.pickles import (
    BLOCK_BYTES,
    BYTE,
    ROOM_BYTES,
    as_array,
    block_of,
    cut,
    cut_blocks,
    dump,
    loader,
    padded,
)
from mpidist.op import LARGEST_COUNT, RESERVED_TAGS, Op

_TAG = RESERVED_TAGS[100]  # of what does not fit a block


class Objects(Moves, Messages):
    """all_gather_object and its relatives.

    Objects are pickled, so only ranks that are trusted may be members. With ``weights_only`` what
    arrives may hold numbers, text, bytes, containers of these and NumPy arrays: anything else is
    an UnpicklingError. All raise DeadlineExceededError and GroupBrokenError as the other operations
    do, and what pickle raises for an object that cannot be pickled.
    """

    def all_gather_object(
        self, object_list: list[Any], obj: Any, weights_only: bool = False
    ) -> None:
        """Collective. Collect every member's object in ``object_list``, by group rank.

        Args:
            object_list: One entry a member; they are replaced.
            obj: What this rank gives.
            weights_only: Accept nothing that could run code.

        Raises:
            ValueError: The list has another length.
        """
        if len(object_list) != self._size:
            raise ValueError(
                f"all_gather_object of group {self.name!r} needs a list of {self._size}, not "
                f"{len(object_list)}"
            )
        object_list[:] = map(loader(weights_only), self._all_gather_bytes(dump(obj)))

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group_dst: int | None = None,
        weights_only: bool = False,
    ) -> None:
        """Collective. Collect every member's object on the root, by group rank.

        Args:
            obj: What this rank gives.
            object_gather_list: On the root one entry a member, which are replaced; on others None.
            dst: World rank of the root; without it, and without ``group_dst``, the first member.
            group_dst: Group rank of the root.
            weights_only: Accept nothing that could run code.

        Raises:
            ValueError: The list has another length, is missing on the root, or given elsewhere.
        """
        root = self._peer("dst", dst, group_dst, default=0)
        target = list_of_root_objects(self, "object_gather_list", object_gather_list, root)
        data = dump(obj)
        if target is None:
            self._at_once(Op("gather", self, block_of(data), root=root))
            if len(data) > ROOM_BYTES:
                self._follow(Op("send", self, as_array(data), root=root, tag=_TAG))
            return
        blocks = np.empty(self._size * BLOCK_BYTES, BYTE)
        self._at_once(Op("gather", self, block_of(data), blocks, root=root))
        sizes, parts = cut_blocks(blocks, self._size)
        # All of them before the first is built: one that cannot be must leave nothing behind.
        whole = [
            data if rank == root else self._whole(size, part, rank)
            for rank, (size, part) in enumerate(zip(sizes, parts, strict=True))
        ]
        target[:] = map(loader(weights_only), whole)

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> None:
        """Collective. Replace the objects of every member's list by those of the root's.

        Args:
            object_list: As long as the root's.
            src: World rank of the root; without it, and without ``group_src``, the first member.
            group_src: Group rank of the root.
            weights_only: Accept nothing that could run code.

        Raises:
            ValueError: The list has another length than the root's.
        """
        root = self._peer("src", src, group_src, default=0)
        if self._rank == root:
            self._broadcast_bytes(dump(list(object_list)), root)
            return
        got = loader(weights_only)(self._broadcast_bytes(None, root))
        if len(got) != len(object_list):
            raise ValueError(
                f"broadcast_object_list of group {self.name!r} brings {len(got)} objects, and the "
                f"list of rank {self.ranks[self._rank]} has {len(object_list)}"
            )
        object_list[:] = got

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: int | None = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> None:
        """Collective. Give each member its object of the root's list, by group rank.

        Args:
            scatter_object_output_list: Its first entry is replaced.
            scatter_object_input_list: On the root one object a member; elsewhere it is not used.
            src: World rank of the root; without it, and without ``group_src``, the first member.
            group_src: Group rank of the root.
            weights_only: Accept nothing that could run code.

        Raises:
            ValueError: A list has another length, or is missing on the root.
        """
        root = self._peer("src", src, group_src, default=0)
        if not scatter_object_output_list:
            raise ValueError("scatter_object_output_list needs one entry to write to")
        # As in torch, where scripts give a list of None there.
        asked = scatter_object_input_list if self._rank == root else None
        given = list_of_root_objects(self, "scatter_object_input_list", asked, root)
        if given is None:
            block = np.empty(BLOCK_BYTES, BYTE)
            self._at_once(Op("scatter", self, None, block, root=root))
            (size,), (part,) = cut_blocks(block, 1)
            scatter_object_output_list[0] = loader(weights_only)(self._whole(size, part, root))
            return
        parts = [dump(obj) for obj in given]
        blocks, own = b"".join(map(padded, parts)), np.empty(BLOCK_BYTES, BYTE)
        self._at_once(Op("scatter", self, as_array(blocks), own, root=root))
        for rank, data in enumerate(parts):
            if rank != root and len(data) > ROOM_BYTES:
                self._follow(Op("send", self, as_array(data), root=rank, tag=_TAG))
        scatter_object_output_list[0] = loader(weights_only)(parts[root])

    def send_object_list(
        self, object_list: Sequence[Any], dst: int | None = None, group_dst: int | None = None
    ) -> None:
        """Point to point. Send objects to a member.

        Args:
            object_list: The objects.
            dst: World rank of the receiver.
            group_dst: Group rank of the receiver.
        """
        data = dump(list(object_list))
        self.send(block_of(data), dst, group_dst=group_dst)
        if len(data) > ROOM_BYTES:
            self.send(as_array(data), dst, group_dst=group_dst)

    def recv_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> int:
        """Point to point. Receive objects into a list.

        Args:
            object_list: As long as the sender's; its entries are replaced.
            src: World rank of the sender; without it, and without ``group_src``, any member.
            group_src: Group rank of the sender.
            weights_only: Accept nothing that could run code.

        Returns:
            World rank of the sender.

        Raises:
            ValueError: The list has another length than the sender's.
        """
        block = np.empty(BLOCK_BYTES, BYTE)
        sender = self.recv(block, src, group_src=group_src)
        (size,), (data,) = cut_blocks(block, 1)
        if size > ROOM_BYTES:
            whole = np.empty(size, BYTE)
            self.recv(whole, sender)
            data = whole.data
        got = loader(weights_only)(data)
        if len(got) != len(object_list):
            raise ValueError(
                f"rank {sender} has sent {len(got)} objects, and the list that receives them has "
                f"{len(object_list)}"
            )
        object_list[:] = got
        return sender

    def all_gather_ragged(self, array: Any) -> list[Array]:
        """Collective. Every member's array, whatever their shapes; torch has no such function.

        Args:
            array: Same dtype on all members.

        Returns:
            New arrays, by group rank.

        Raises:
            ValueError: The dtypes differ; on all members.
        """
        own = host_view(array)
        facts: list[Any] = [None] * self._size
        self.all_gather_object(facts, (own.dtype, own.shape))
        if any(dtype != own.dtype for dtype, _ in facts):
            raise ValueError(
                f"all_gather_ragged of group {self.name!r} needs one dtype, not "
                f"{[str(dtype) for dtype, _ in facts]} by group rank"
            )
        outputs = [np.empty(shape, own.dtype) for _, shape in facts]
        if sum(movable(output).size for output in outputs) > LARGEST_COUNT:
            whole = Op("all_gather", self)  # more than one call of MPI can count
            whole.send_parts = dict.fromkeys(range(self._size), movable(own))
            whole.recv_parts = {rank: movable(output) for rank, output in enumerate(outputs)}
            self._at_once(whole, later=True)
            return outputs
        memory, finish = spread(outputs)
        gathered = movable(memory)
        record = Op("all_gather_v", self, movable(own), gathered, finish=finish)
        record.recv_counts = [output.nbytes // gathered.itemsize for output in outputs]
        self._at_once(record, later=True)
        return outputs

    # Inside

    def _all_gather_bytes(self, data: bytes) -> list[memoryview]:
        blocks = np.empty(self._size * BLOCK_BYTES, BYTE)
        self._at_once(Op("all_gather", self, block_of(data), blocks))
        counts, parts = cut_blocks(blocks, self._size)
        if max(counts) <= ROOM_BYTES:
            return parts
        if sum(counts) > LARGEST_COUNT:  # more than one call of MPI can count
            given = [data if rank == self._rank else None for rank in range(self._size)]
            return [self._broadcast_bytes(part, root) for root, part in enumerate(given)]
        whole = np.empty(sum(counts), np.uint8)
        record = Op("all_gather_v", self, as_array(data), whole)
        record.recv_counts = list(counts)  # which mpi4py takes for numbers, unlike a tuple
        self._at_once(record, later=True)
        return cut(whole, counts)

    def _whole(self, size: int, part: memoryview, rank: int) -> memoryview:
        """Data of which a member has given a block; what does not fit it follows by message."""
        if size <= ROOM_BYTES:
            return part
        whole = np.empty(size, BYTE)
        self._follow(Op("recv", self, None, whole, root=rank, tag=_TAG))
        return whole.data

    def _broadcast_bytes(self, data: bytes | None, root: int) -> memoryview:
        block = np.empty(BLOCK_BYTES, BYTE) if data is None else block_of(data)
        self._at_once(Op("broadcast", self, None, block, root=root))
        (size,), (part,) = cut_blocks(block, 1)
        if size <= ROOM_BYTES:
            return part
        whole = np.empty(size, BYTE) if data is None else as_array(data)
        self._at_once(Op("broadcast", self, None, whole, root=root), later=True)
        return whole.data
