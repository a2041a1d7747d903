"""What this rank waits for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

# A message may still be on its way when its sender's leave note arrives; and MPI may have a little
# to do yet in a collective that others have completed.
_GRACE_S = 1.0
_GRACE_OF_ALL_S = 3.0

ALL = -2
"""The peer of an operation that every member must come to, and that no group counts."""


class Waiting(Protocol):
    """An operation in which this rank may be blocked.

    Attributes:
        sequence: Which collective of its group it is, from 1; 0 for point to point.
    """

    sequence: int

    @property
    def peer(self) -> int:
        """Local. World rank of the other side in point to point; -1 for any member; or ``ALL``."""

    @property
    def group_number(self) -> int:
        """Local. Unique number of the group, equal on all members."""

    @property
    def members(self) -> tuple[int, ...]:
        """Local. World ranks of the group."""

    def describe(self) -> str:
        """Local. The operation, in words."""

    def call(self) -> str:
        """Return the call as it must be on all members; "" if that is not known."""


class Waits:
    """The operations that threads of this rank are in, and the collectives of each group so far.

    Attributes:
        current: The operations, each by a key of the thread that blocks, which takes it out after.
        counts: Collectives begun, by group number.
    """

    def __init__(self) -> None:
        self.current: dict[int, Waiting] = {}
        self.counts: dict[int, int] = {}
        self._seen: dict[int, tuple[Waiting, float]] = {}

    def observe(self, now: float) -> list[tuple[Waiting, float]]:
        """Local. The operations now under way, each with the time when it was first observed.

        Operations are not stamped when they begin: most end before anybody looks, and reading
        the clock would cost them more than all else here.
        """
        operations = list(self.current.values())
        # Holding the seen operations keeps their ids from being given to new ones.
        self._seen = {id(op): self._seen.get(id(op), (op, now)) for op in operations}
        return list(self._seen.values())


def missing_rank(
    operation: Waiting,
    since: float,
    left: Mapping[int, float],
    counts: Mapping[int, Mapping[int, int]],
    now: float,
) -> int | None:
    """Local. A rank that has left and without which an operation can never end.

    Args:
        operation: What is waited for.
        since: When it was first observed.
        left: When the leave note of each rank that has left arrived.
        counts: For each of them, how many collectives of each group it took part in.
        now: The time, on the same clock.

    Returns:
        The rank, or None: the operation may still end.
    """
    if operation.sequence:
        for rank in operation.members:
            taken_part = counts.get(rank, {}).get(operation.group_number, 0)
            if rank in left and taken_part < operation.sequence:
                return rank
        return None
    grace_s = _GRACE_S
    if operation.peer >= 0:
        gone = [operation.peer] if operation.peer in left else []
    else:
        gone = [rank for rank in operation.members if rank in left]
        if operation.peer == ALL:
            grace_s = _GRACE_OF_ALL_S
        elif len(gone) < len(operation.members) - 1:  # of any: whoever waits has not left
            return None
    if not gone:
        return None
    last = max(since, *(left[rank] for rank in gone))
    return gone[0] if now - last > grace_s else None
