"""What a process group does, as records: every operation becomes an Op, which an executor runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.arrays import Array, Finish, ReduceOp

if TYPE_CHECKING:
    from mpidist.group import ProcessGroup

# One call of MPI moves at most this many elements: not every library counts beyond 2^31.
LARGEST_COUNT = (1 << 31) - 1
_PIECE_COUNT = 1 << 30


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
        sequence: Which collective of the group it is, from 1; 0 for point to point.
    """

    __slots__ = ("finish", "group", "name", "recv", "reduce", "root", "send", "sequence", "tag")

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
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
        self.sequence = 0

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
        """Local. Elements that one call of MPI has to count."""
        if self.recv is None:
            return 0 if self.send is None else self.send.size
        return (self.recv if self.send is None else self.send).size

    def describe(self) -> str:
        """Local. The operation, in words."""
        number = f" number {self.sequence}" if self.sequence else ""
        return f"{self.name}{number} of group {self.group.name!r}"

    def __repr__(self) -> str:
        buffer = self.recv if self.recv is not None else self.send
        what = "" if buffer is None else f", {buffer.dtype}[{buffer.size}]"
        return f"<Op {self.describe()}{what}>"


def in_pieces(op: Op) -> list[Op]:
    """Local. An elementwise Op as several, each small enough for every MPI's counts.

    Args:
        op: Any Op whose buffers are C-contiguous; for all_gather, each rank's part must be small
            enough already.

    Returns:
        The Op itself if it is small enough.
    """
    size = op.count()
    if size <= LARGEST_COUNT or op.name == "all_gather":
        return [op]
    pieces = []
    for start in range(0, size, _PIECE_COUNT):
        cut = slice(start, start + _PIECE_COUNT)
        send, recv = (None if b is None else b.reshape(-1)[cut] for b in (op.send, op.recv))
        pieces.append(Op(op.name, op.group, send, recv, op.reduce, op.root, op.tag))
    return pieces
