"""Python objects between members of a group, pickled."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.arrays import Array, host_view, movable, spread
from mpidist.group.checks import list_of_root_objects
from mpidist.group.messages import Messages
from mpidist.group.moves import Moves
from mpidist.op import LARGEST_COUNT, Op

# Small objects travel together with their size.
_SIZE = struct.Struct("<Q")
_BLOCK_BYTES = 512
_ROOM_BYTES = _BLOCK_BYTES - _SIZE.size

# What may be built without pickle: data, and nothing that runs code.
_HARMLESS = frozenset(
    {("builtins", name) for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")}
    | {(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in
       ("_reconstruct", "scalar")}
    | {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
    | {("numpy", "dtype"), ("numpy", "ndarray"), ("collections", "OrderedDict")}
    | {("ml_dtypes", name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
)  # fmt: skip


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
        object_list[:] = [_load(data, weights_only) for data in self._all_gather_bytes(_dump(obj))]

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
        root = self._peer(dst, group_dst, default=0)
        target = list_of_root_objects(self, "object_gather_list", object_gather_list, root)
        data = _dump(obj)
        sizes = np.empty(self._size, np.int64) if target is not None else None
        self._collective(Op("gather", self, np.array([data.size]), sizes, root=root), False)
        if target is None or sizes is None:
            self._collective(Op("gather_v", self, data, root=root), False)
            return
        counts = [int(size) for size in sizes]
        memory = np.empty(sum(counts), np.uint8)
        record = Op("gather_v", self, data, memory, root=root)
        record.recv_counts = counts
        self._collective(record, False)
        target[:] = [_load(part, weights_only) for part in _cut(memory, counts)]

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
        root = self._peer(src, group_src, default=0)
        if self._rank == root:
            self._broadcast_bytes(_dump(list(object_list)), root)
            return
        got = _load(self._broadcast_bytes(None, root), weights_only)
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
            scatter_object_input_list: On the root one object a member; on others None.
            src: World rank of the root; without it, and without ``group_src``, the first member.
            group_src: Group rank of the root.
            weights_only: Accept nothing that could run code.

        Raises:
            ValueError: A list has another length, is missing on the root, or given elsewhere.
        """
        root = self._peer(src, group_src, default=0)
        if not scatter_object_output_list:
            raise ValueError("scatter_object_output_list needs one entry to write to")
        given = list_of_root_objects(
            self, "scatter_object_input_list", scatter_object_input_list, root
        )
        parts = None if given is None else [_dump(obj) for obj in given]
        counts = None if parts is None else np.array([part.size for part in parts])
        size = np.empty(1, np.int64)
        self._collective(Op("scatter", self, counts, size, root=root), False)
        memory = np.empty(int(size[0]), np.uint8)
        record = Op("scatter_v", self, None, memory, root=root)
        if parts is not None and counts is not None:
            record.send, record.send_counts = np.concatenate(parts), [int(n) for n in counts]
        self._collective(record, False)
        scatter_object_output_list[0] = _load(memory, weights_only)

    def send_object_list(
        self, object_list: Sequence[Any], dst: int | None = None, group_dst: int | None = None
    ) -> None:
        """Point to point. Send objects to a member.

        Args:
            object_list: The objects.
            dst: World rank of the receiver.
            group_dst: Group rank of the receiver.
        """
        data = _dump(list(object_list))
        self.send(np.array([data.size]), dst, group_dst=group_dst)
        self.send(data, dst, group_dst=group_dst)

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
        size = np.empty(1, np.int64)
        sender = self.recv(size, src, group_src=group_src)
        data = np.empty(int(size[0]), np.uint8)
        self.recv(data, sender)
        got = _load(data, weights_only)
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
        self.all_gather_object(facts, (own.dtype.name, own.shape))
        if len({name for name, _ in facts}) > 1:
            raise ValueError(
                f"all_gather_ragged of group {self.name!r} needs one dtype, not "
                f"{[name for name, _ in facts]} by group rank"
            )
        outputs = [np.empty(shape, own.dtype) for _, shape in facts]
        memory, finish = spread(outputs)
        gathered = movable(memory)
        record = Op("all_gather_v", self, movable(own), gathered, finish=finish)
        record.recv_counts = [output.nbytes // gathered.itemsize for output in outputs]
        self._collective(record, False)
        return outputs

    # Inside

    def _all_gather_bytes(self, data: Array) -> list[Array]:
        blocks = np.empty((self._size, _BLOCK_BYTES), np.uint8)
        self._collective(Op("all_gather", self, _block(data), blocks), False)
        counts = [_SIZE.unpack_from(block.data)[0] for block in blocks]
        if max(counts) <= _ROOM_BYTES:
            return [
                block[_SIZE.size :][:count] for block, count in zip(blocks, counts, strict=True)
            ]
        if sum(counts) > LARGEST_COUNT:  # more than one call of MPI can count
            parts = [data if r == self._rank else None for r in range(self._size)]
            return [self._broadcast_bytes(part, root) for root, part in enumerate(parts)]
        memory = np.empty(sum(counts), np.uint8)
        record = Op("all_gather_v", self, data, memory)
        record.recv_counts = counts
        self._collective(record, False)
        return _cut(memory, counts)

    def _broadcast_bytes(self, data: Array | None, root: int) -> Array:
        block = np.empty(_BLOCK_BYTES, np.uint8) if data is None else _block(data)
        self._collective(Op("broadcast", self, None, block, root=root), False)
        (size,) = _SIZE.unpack_from(block.data)
        if size <= _ROOM_BYTES:
            return block[_SIZE.size :][:size]
        if data is None:
            data = np.empty(size, np.uint8)
        self._collective(Op("broadcast", self, None, data, root=root), False)
        return data


class _Restricted(pickle.Unpickler):
    """Builds data, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(
                f"an object holds {module}.{name}, which weights_only does not let in"
            )
        return super().find_class(module, name)


def _block(data: Array) -> Array:
    """The size of data, and as much of them as has room behind it."""
    head = _SIZE.pack(data.size) + data[:_ROOM_BYTES].tobytes()
    return np.frombuffer(bytearray(head.ljust(_BLOCK_BYTES)), np.uint8)


def _dump(obj: Any) -> Array:
    return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)


def _load(data: Array, weights_only: bool) -> Any:
    if weights_only:
        return _Restricted(io.BytesIO(data.data)).load()
    return pickle.loads(data.data)


def _cut(memory: Array, counts: Sequence[int]) -> list[Array]:
    ends = itertools.accumulate(counts)
    return [memory[end - count : end] for end, count in zip(ends, counts, strict=True)]
