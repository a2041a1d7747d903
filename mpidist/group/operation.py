"""Operations as records: every call of a process group becomes an Op, which a backend runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.buffers.host_view import Array
from mpidist.buffers.packing import OnComplete
from mpidist.buffers.reduce_op import MpiReduction, ReduceOp, WrappingSum

if TYPE_CHECKING:
    from mpidist.work import Work

# Not every MPI library counts beyond 2^31 elements in one call.
LARGEST_COUNT = (1 << 31) - 1
_SEGMENT_COUNT = 1 << 30
_COLUMN_COUNT = 1 << 26
# Tags of messages that are part of an operation. Every MPI has tags up to 32767.
RESERVED_TAGS = range(29000, 32768)
# Bytes from which a part travels as a message of its own. A message needs no place in a joint
# buffer, so no part is copied, wherever the arrays lie.
MIN_MESSAGE_BYTES = 1 << 16
_DIRECTIONS = {"send": "to", "recv": "from"}
SHAPED = frozenset(("all_reduce", "reduce", "scan", "exscan"))
"""Operations whose arrays have the same shape and dtype on all members."""
SIZED = frozenset(
    (
        "broadcast",
        "all_gather",
        "gather",
        "all_to_all",
        "neighbor_all_gather",
        "neighbor_all_to_all",
    )
)
"""Operations that move arrays of the same size in bytes on all members.

Their dtypes are not compared: MPI has no types for some, which move as bytes.
"""

Signature = tuple[object, ...]
"""The facts of a collective that must be equal on all members.

They are name, reduction, root, shape or size, type character, and whether MPI's nonblocking call is
used.

The size is in bytes for data movement, in elements for reduce_scatter, and -1 if the members may
have different sizes. A tuple of basic types, because :mod:`marshal` encodes it for the checksum.
For a GPU backend, the fifth entry is the dtype name and the sixth the backend name.
"""
_NEIGHBORS = frozenset(("neighbor_all_gather", "neighbor_all_to_all"))


@dataclass(frozen=True)
class GroupInfo:
    """The facts about a group that its operations and backends need.

    Attributes:
        name: Name of the group in error messages.
        number: Unique, and equal on all members.
        ranks: World rank of each member, by group rank.
        rank: Group rank of this process.
        size: Number of members.
    """

    name: str
    number: int
    ranks: tuple[int, ...]
    rank: int
    size: int


class Op:
    """One operation of a group, ready to run.

    Args:
        name: ``"all_reduce"``, ...
        group: The group.
        send: The array that this rank contributes, or None.
        recv: The array that receives the result, or None. An operation in place has ``recv`` alone.
        reduce: The reduction; MPI computes AVG and PREMUL_SUM as sums.
        root: Group rank of the root, or of the peer of a message. -1 if there is no root, or for a
            receive from any peer.
        tag: Tag of a message.
        finish: Function to call after the operation, to copy or divide results; or None.

    Attributes:
        recv_counts: The number of elements from each member, where the numbers differ.
        send_parts: The contiguous array for each member, by group rank. An Op has either parts or
            ``send`` and ``recv``.
        recv_parts: The contiguous array that receives from each member, by group rank.
        limit: Time limit in seconds; None for the group's.
        sequence: Number of this collective in its group, from 1; 0 for a message.
        halfway: True if the operation has several MPI calls, and perhaps not all of them were made.
        late: The Work of a send or receive that is still pending past its time limit.
        segments: The operations that were started in its place, if it exceeds one call of MPI.
        outputs: The caller's arrays that the Work of an asynchronous collective returns.
        signature: The signature of a collective; None if the group does not compare calls.
        slot: Place of the operation in the flight recorder.
    """

    # Defaults on the class make the many operations that never set these cheaper.
    sequence = 0
    halfway = False
    limit: float | None = None
    recv_counts: Sequence[int] | None = None
    send_parts: Mapping[int, Array] = MappingProxyType({})
    recv_parts: Mapping[int, Array] = MappingProxyType({})
    segments: Sequence[Op] = ()
    late: Work | None = None
    outputs: Sequence[Any] | None = None
    signature: Signature | None = None
    slot = 0

    def __init__(
        self,
        name: str,
        group: GroupInfo,
        send: Array | None = None,
        recv: Array | None = None,
        reduce: MpiReduction = ReduceOp.SUM,
        root: int = -1,
        tag: int = 0,
        finish: OnComplete = None,
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
        """The number of the group; see :class:`mpidist.mpi.pending.PendingOp`."""
        return self.group.number

    @property
    def members(self) -> tuple[int, ...]:
        """The world ranks of the group; see :class:`mpidist.mpi.pending.PendingOp`."""
        return self.group.ranks

    @property
    def peer(self) -> int:
        """World rank of the root or peer, or -1; see :class:`mpidist.mpi.pending.PendingOp`."""
        return self.group.ranks[self.root] if self.root >= 0 else -1

    @property
    def is_blocking(self) -> bool:
        """True for a blocking collective with a signature.

        See :class:`mpidist.mpi.pending.PendingOp`.
        """
        return self.signature is not None and self.signature[5] is False

    def count(self) -> int:
        """Return the count argument of the MPI call: the size of the smaller array."""
        if self.recv is None:
            return 0 if self.send is None else self.send.size
        return self.recv.size if self.send is None else min(self.send.size, self.recv.size)

    def buffers(self) -> list[tuple[Array, bool]]:
        """Return the arrays that MPI uses, each with whether MPI writes it."""
        read = (self.send, *self.send_parts.values())
        written = (self.recv, *self.recv_parts.values())
        used = [(array, False) for array in read if array is not None]
        return used + [(array, True) for array in written if array is not None]

    def describe(self) -> str:
        """Return the operation in words, for messages."""
        detail = f" number {self.sequence}" if self.sequence else ""
        if self.name in _DIRECTIONS and self.root >= 0:
            detail = f" {_DIRECTIONS[self.name]} rank {self.peer}"
        return f"{self.name}{detail} of group {self.group.name!r}"

    def call(self) -> str:
        """Return the signature as text; "" if there is none."""
        return "" if self.signature is None else in_words(self.signature, self.group)

    def facts(self) -> tuple[object, ...]:
        """Return facts that tell the calls of a group apart, without a signature."""
        array = self.recv if self.send is None else self.send
        size, kind = (0, "") if array is None else (array.size, array.dtype.char)
        return self.name, self.root, self.tag, size, kind

    def recorded(self) -> dict[str, Any]:
        """Return the call for the flight recorder."""
        array = self.recv if self.send is None else self.send
        text = self.call()
        if not text:  # a message, or a collective that is not compared
            is_equal = self.name in (*SHAPED, "broadcast", *_DIRECTIONS)  # the array, on all ranks
            peer = f"{_DIRECTIONS.get(self.name, 'root')} rank {self.peer}"
            words = [peer] if self.peer >= 0 else []
            words += [f"{array.dtype}[{array.size}]"] if array is not None and is_equal else []
            words += [f"tag {self.tag}"] if self.tag else []
            text = f"{self.name}({', '.join(words)})"
        return {
            "name": self.name,
            "text": text,
            "peer": self.peer,
            "tag": int(self.tag),
            "dtype": "" if array is None else str(array.dtype),
            "shape": [] if array is None else list(array.shape),
        }

    def __repr__(self) -> str:
        buffer = self.recv if self.recv is not None else self.send
        shape = "" if buffer is None else f", {buffer.dtype}[{buffer.size}]"
        return f"<Op {self.describe()}{shape}>"


def in_words(signature: Signature, group: GroupInfo) -> str:
    """Return a signature as text, for example ``all_reduce(SUM, float32[3])``.

    The reduction and the dtype are those that MPI uses: a SUM of bools is a BOR of uint8.
    """
    name, reduction, root, shape, kind, nonblocking = signature
    words = []
    if name in SHAPED or name in ("reduce_scatter", "reduce_scatter_tensor"):
        assert isinstance(reduction, int)
        wraps = reduction == WrappingSum.SUM
        words.append(ReduceOp.SUM.name if wraps else ReduceOp(reduction).name)
    assert isinstance(root, int)
    if root >= 0:
        words.append(f"root {group.ranks[root]}")
    if kind:
        assert isinstance(kind, str)
        lengths = shape if isinstance(shape, tuple) else (shape,)
        words.append(f"{np.dtype(kind)}[{', '.join(map(str, lengths))}]")
    elif shape != -1:
        words.append(f"{shape} bytes")
    if isinstance(nonblocking, str):
        words.append(f"on GPUs by {nonblocking}")
    elif nonblocking:
        words.append("nonblocking")
    return f"{name}({', '.join(words)})"


def split_counts(array: Array, most: int | None = None) -> list[Array]:
    """Return a contiguous array as several, each within ``most`` elements.

    The default is the largest count of every MPI.
    """
    most = LARGEST_COUNT if most is None else most
    if array.size <= most:
        return [array]
    array, length = array.reshape(-1), min(most, _SEGMENT_COUNT)
    return [array[start : start + length] for start in range(0, array.size, length)]


def split_op(op: Op, most: int | None = None) -> list[Op]:
    """Return an Op as several, each within ``most`` elements.

    The arrays of elementwise operations are sliced. Each rank of reduce_scatter receives a part of
    its own, so columns of all parts are copied together.

    Args:
        op: An Op whose buffers are C-contiguous.
        most: Number of elements. The default is the largest count of every MPI.

    Returns:
        The Op itself if it is small enough.

    Raises:
        ValueError: A ragged operation, or one between neighbours, exceeds the counts.
    """
    size, most = op.count(), LARGEST_COUNT if most is None else most
    if size <= most:
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
        itertools.repeat(None) if buffer is None else split_counts(buffer, most)
        for buffer in (op.send, op.recv)
    )
    return [
        Op(op.name, op.group, send, recv, op.reduce, op.root, op.tag)
        for send, recv in zip(sends, recvs, strict=False)
    ]


def _columns(op: Op, start: int, end: int) -> Op:
    """Return a reduce_scatter of the elements from start to end of every part."""
    assert op.send is not None
    assert op.recv is not None
    send = op.send.reshape(op.group.size, -1)[:, start:end].copy()
    return Op(op.name, op.group, send, op.recv.reshape(-1)[start:end], op.reduce)
