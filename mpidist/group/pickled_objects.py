"""Collectives on Python objects, which travel as pickles.

A block holds the length of a pickle and its first 504 bytes, so most objects take one step. A
longer pickle is then sent whole in a second step.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.buffers.host_view import Array
from mpidist.group.operation import LARGEST_COUNT, RESERVED_TAGS, GroupInfo, Op
from mpidist.group.submission import Submission

_LENGTH = struct.Struct("<Q")
BLOCK_BYTES = 512
_ROOM_BYTES = BLOCK_BYTES - _LENGTH.size
_BLOCK = struct.Struct(f"<Q{_ROOM_BYTES}x")
_BYTE = np.dtype(np.uint8)
_TAG = RESERVED_TAGS[100]  # of pickles that do not fit a block


class ObjectCollectives:
    """Collectives on the objects of one group.

    Args:
        info: The facts about the group.
        submission: The submission of the group.
    """

    def __init__(self, info: GroupInfo, submission: Submission) -> None:
        self._info = info
        self._submission = submission

    def all_gather(self, obj: Any) -> list[Any]:
        """Collective. Return the objects of all members, by group rank."""
        return [load(data) for data in self._all_gather_bytes(dump(obj))]

    def gather(self, obj: Any, root: int) -> list[Any] | None:
        """Collective. Return the objects of all members on the root, by group rank; else None."""
        info, run = self._info, self._submission.submit_for_result
        data = dump(obj)
        if info.rank != root:
            run(Op("gather", info, block_of(data), root=root))
            if exceeds_block(len(data)):
                self._send(data, root)
            return None
        blocks = np.empty(info.size * BLOCK_BYTES, _BYTE)
        run(Op("gather", info, block_of(data), blocks, root=root))
        lengths, parts = split_blocks(blocks)
        # Receive all before the first is unpickled: an error there must leave no message behind.
        whole = [
            data if rank == root else self._complete(length, part, rank)
            for rank, (length, part) in enumerate(zip(lengths, parts, strict=True))
        ]
        return [load(one) for one in whole]

    def broadcast(self, objects: Sequence[Any], root: int) -> Any:
        """Collective. Return the list of objects of the root."""
        if self._info.rank == root:
            self._broadcast_bytes(dump(list(objects)), root)
            return objects
        return load(self._broadcast_bytes(None, root))

    def scatter(self, objects: Sequence[Any] | None, root: int) -> Any:
        """Collective. Return this rank's object of the root's list.

        Args:
            objects: One object for each member on the root; else None.
            root: Group rank of the root.
        """
        info, run = self._info, self._submission.submit_for_result
        block = np.empty(BLOCK_BYTES, _BYTE)
        if objects is None:
            run(Op("scatter", info, None, block, root=root))
            (length,), (part,) = split_blocks(block)
            return load(self._complete(length, part, root))
        pickles = [dump(obj) for obj in objects]
        blocks = as_array(b"".join(map(_padded, pickles)))
        run(Op("scatter", info, blocks, block, root=root))
        for rank, data in enumerate(pickles):
            if rank != root and exceeds_block(len(data)):
                self._send(data, rank)
        return load(pickles[root])

    def _all_gather_bytes(self, data: bytes) -> Sequence[memoryview | bytes]:
        info, run = self._info, self._submission.submit_for_result
        blocks = np.empty(info.size * BLOCK_BYTES, _BYTE)
        run(Op("all_gather", info, block_of(data), blocks))
        lengths, parts = split_blocks(blocks)
        if max(lengths) <= _ROOM_BYTES:
            return parts
        if sum(lengths) > LARGEST_COUNT:  # more than one call of MPI can count
            given = [data if rank == info.rank else None for rank in range(info.size)]
            return [self._broadcast_bytes(part, root) for root, part in enumerate(given)]
        whole = np.empty(sum(lengths), _BYTE)
        op = Op("all_gather_v", info, as_array(data), whole)
        op.recv_counts = lengths
        run(op, continues=True)
        ends = itertools.accumulate(lengths)
        return [whole.data[end - n : end] for end, n in zip(ends, lengths, strict=True)]

    def _broadcast_bytes(self, data: bytes | None, root: int) -> memoryview:
        run = self._submission.submit_for_result
        block = np.empty(BLOCK_BYTES, _BYTE) if data is None else block_of(data)
        run(Op("broadcast", self._info, None, block, root=root))
        (length,), (part,) = split_blocks(block)
        if not exceeds_block(length):
            return part
        whole = np.empty(length, _BYTE) if data is None else as_array(data)
        run(Op("broadcast", self._info, None, whole, root=root), continues=True)
        return whole.data

    def _send(self, data: bytes, rank: int) -> None:
        """Send a pickle that does not fit its block."""
        op = Op("send", self._info, as_array(data), root=rank, tag=_TAG)
        self._submission.run_message_of_collective(op)

    def _complete(self, length: int, part: memoryview, rank: int) -> memoryview:
        """Return the pickle of a block; receive it first if the block has no room for it."""
        if not exceeds_block(length):
            return part
        whole = np.empty(length, _BYTE)
        op = Op("recv", self._info, None, whole, root=rank, tag=_TAG)
        self._submission.run_message_of_collective(op)
        return whole.data


def dump(obj: Any) -> bytes:
    """Return the pickle of an object."""
    return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)


def load(data: memoryview | bytes) -> Any:
    """Return the object of a pickle; bytes behind its end are ignored."""
    return pickle.loads(data)


def as_array(data: bytes) -> Array:
    """Return bytes as a read-only uint8 array."""
    return np.frombuffer(data, _BYTE)


def exceeds_block(length: int) -> bool:
    """Return whether a pickle of this length in bytes does not fit a block."""
    return length > _ROOM_BYTES


def block_of(data: bytes) -> Array:
    """Return the block of a pickle: its length and the bytes that fit, uint8[BLOCK_BYTES]."""
    return as_array(_padded(data))


def split_blocks(blocks: Array) -> tuple[list[int], list[memoryview]]:
    """Return the lengths of the pickles in some blocks, and their contents with the padding."""
    memory = blocks.data
    lengths = [length for (length,) in _BLOCK.iter_unpack(memory)]
    ends = range(BLOCK_BYTES, len(memory) + 1, BLOCK_BYTES)
    return lengths, [memory[end - _ROOM_BYTES : end] for end in ends]


def _padded(data: bytes) -> bytes:
    return (_LENGTH.pack(len(data)) + data[:_ROOM_BYTES]).ljust(BLOCK_BYTES)
