"""What a process group does, as records: every operation becomes an Op, which an executor runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mpidist.arrays import Array, Finish
from mpidist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from mpidist.group.core import Core
    from mpidist.work import Work

# One call of MPI moves at most this many elements: not every library counts beyond 2^31.
LARGEST_COUNT = (1 << 31) - 1
_PIECE_COUNT = 1 << 30
_COLUMN_COUNT = 1 << 26
# Of messages that are part of an operation; every MPI has tags up to 32767.
RESERVED_TAGS = range(29000, 32768)
# Bytes from which a part that goes from one rank to another is a message of its own. So it needs no
# place behind the others' parts: no copy, wherever the arrays lie.
WORTH_A_MESSAGE = 1 << 16
_OTHER_SIDE = {"send": "to", "recv": "from"}
_NEIGHBORS = frozenset(("neighbor_all_gather", "neighbor_all_to_all"))


class Op:
    """One operation of a group, ready to be carried out.

    Args:
        name: ``"all_reduce"``, ...
        group: Whose.
        send: What this rank contributes, or None.
        recv: What this rank gets; both for an operation in place.
        reduce: MPI's operation for reductions.
        root: Group rank of the root, or of the other side; -1 for any.
        tag: Of a message.
        finish: What is left to do afterwards.

    Attributes:
        recv_counts: How many come from each member, where they differ.
        send_parts: What goes to each member, contiguous, by group rank. An Op has either parts, or
            ``send`` and ``recv``.
        recv_parts: Where what comes from each member belongs; likewise.
        limit: Its time limit in seconds; by default the group's.
        sequence: Which collective of the group it is, from 1; 0 for point to point.
        halfway: Whether some of several messages that it is made of may be left.
        late: It itself, under way past its time limit.
        pieces: What it was begun as, if it is too long for one call of MPI.
        outputs: The arrays that the Work of an asynchronous collective returns; the caller's own.
    """

    # What most never set: to have it here makes them cheaper.
    sequence = 0
    halfway = False
    limit: float | None = None
    recv_counts: Sequence[int] | None = None
    send_parts: Mapping[int, Array] = MappingProxyType({})
    recv_parts: Mapping[int, Array] = MappingProxyType({})
    pieces: Sequence[Op] = ()
    late: Work | None = None
    outputs: Sequence[Any] | None = None

    def __init__(
        self,
        name: str,
        group: Core,
        send: Array | None = None,
        recv: Array | None = None,
        reduce: ReduceOp = ReduceOp.SUM,
        root: int = -1,
        tag: int = 0,
        finish: Finish = None,
    ) -> None:
        self.name = name
        self.group = group
        self.send = send
        self.recv = recv
        self.reduce = reduce
        self.root = root
        self.tag = tag
        self.finish = finish

    @property
    def group_number(self) -> int:
        """Local. See :class:`mpidist.runtime.waits.Waiting`."""
        return self.group.number

    @property
    def members(self) -> tuple[int, ...]:
        """Local. See :class:`mpidist.runtime.waits.Waiting`."""
        return self.group.ranks

    @property
    def peer(self) -> int:
        """Local. See :class:`mpidist.runtime.waits.Waiting`."""
        return self.group.ranks[self.root] if self.root >= 0 else -1

    def count(self) -> int:
        """Local. Elements that one call of MPI has to count, at most."""
        if self.recv is None:
            return 0 if self.send is None else self.send.size
        return self.recv.size if self.send is None else min(self.send.size, self.recv.size)

    def buffers(self) -> list[tuple[Array, bool]]:
        """Local. The arrays that MPI uses, each with whether it writes it."""
        read, written = (
            (self.send, *self.send_parts.values()),
            (self.recv, *self.recv_parts.values()),
        )
        used = [(array, False) for array in read if array is not None]
        return used + [(array, True) for array in written if array is not None]

    def describe(self) -> str:
        """Local. The operation, in words."""
        which = f" number {self.sequence}" if self.sequence else ""
        if self.name in _OTHER_SIDE and self.root >= 0:
            which = f" {_OTHER_SIDE[self.name]} rank {self.peer}"
        return f"{self.name}{which} of group {self.group.name!r}"

    def __repr__(self) -> str:
        buffer = self.recv if self.recv is not None else self.send
        what = "" if buffer is None else f", {buffer.dtype}[{buffer.size}]"
        return f"<Op {self.describe()}{what}>"


def cut(array: Array) -> list[Array]:
    """Local. A contiguous array as several, each small enough for every MPI's counts."""
    if array.size <= LARGEST_COUNT:
        return [array]
    array = array.reshape(-1)
    return [array[start : start + _PIECE_COUNT] for start in range(0, array.size, _PIECE_COUNT)]


def in_pieces(op: Op) -> list[Op]:
    """Local. An Op as several, each small enough for every MPI's counts.

    Elementwise operations are cut where they lie; of reduce_scatter, in which every rank has a part
    of its own, columns of all parts are gathered in memory of their own.

    Args:
        op: Any Op whose buffers are C-contiguous.

    Returns:
        The Op itself if it is small enough.

    Raises:
        ValueError: It moves too many elements between neighbours, or objects that are too long.
    """
    size = op.count()
    if size <= LARGEST_COUNT:
        return [op]
    if op.recv_counts or op.name in _NEIGHBORS:
        raise ValueError(
            f"{op.describe()} moves {size} elements, and this operation at most {LARGEST_COUNT}; "
            "send fewer at a time"
        )
    if op.name == "reduce_scatter":
        return [
            _columns(op, start, min(start + _COLUMN_COUNT, size))
            for start in range(0, size, _COLUMN_COUNT)
        ]
    sends, recvs = (
        itertools.repeat(None) if buffer is None else cut(buffer) for buffer in (op.send, op.recv)
    )
    return [
        Op(op.name, op.group, send, recv, op.reduce, op.root, op.tag)
        for send, recv in zip(sends, recvs, strict=False)
    ]


def _columns(op: Op, start: int, end: int) -> Op:
    """The elements from start to end of every part."""
    assert op.send is not None
    assert op.recv is not None
    send = op.send.reshape(op.group.size(), -1)[:, start:end].copy()
    return Op(op.name, op.group, send, op.recv.reshape(-1)[start:end], op.reduce)
