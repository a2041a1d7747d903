"""The operations in which threads of this rank are blocked, for the watchdog."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mpi4py import MPI

# A message may still be on its way when the leave note of its sender arrives. MPI may also need a
# moment to end a collective that the other members have completed.
_GRACE_S = 1.0
_ALL_GRACE_S = 3.0
_MAX_SHOWN = 8  # ranks in a message

DETAIL_HINT = "; set MPIDIST_DEBUG=detail to check whether ranks call different collectives"

ALL_MEMBERS = -2
"""The peer of a call that needs every member and has no sequence number."""


class PendingOp(Protocol):
    """An operation in which a thread of this rank may be blocked.

    Attributes:
        sequence: Number of the collective in its group, from 1; 0 for point-to-point operations.
        slot: Its place in the flight recorder; 0 if there is none.
    """

    sequence: int
    slot: int

    @property
    def peer(self) -> int:
        """World rank of the root or peer, -1 if there is none, or ``ALL_MEMBERS``.

        A receive with -1 takes a message from any member.
        """

    @property
    def group_number(self) -> int:
        """Number of the group, equal on all members."""

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of the group."""

    def describe(self) -> str:
        """Return the operation in words."""

    @property
    def is_blocking(self) -> bool:
        """True for a collective with a signature that blocks its thread until it has ended."""

    def call(self) -> str:
        """Return the signature of the call as text; "" if the group records no signatures."""


class PendingOps:
    """The pending operations of this rank, and the number of collectives of each group.

    Attributes:
        current: The pending operations. The blocked thread adds its operation under a key of its
            own and removes it afterwards.
        counts: Number of the last collective that this rank has begun and that has not failed, by
            group number.
    """

    def __init__(self) -> None:
        self.current: dict[int, PendingOp] = {}
        self.counts: dict[int, int] = {}
        self._seen: dict[int, tuple[PendingOp, float]] = {}

    def observe(self, now: float) -> list[tuple[PendingOp, float]]:
        """Return the pending operations, each with the time at which it was first observed.

        Operations are not stamped when they begin. Most end before the watchdog looks, and reading
        the clock would cost more than adding them to ``current``.

        Args:
            now: The time, in seconds.
        """
        operations = list(self.current.values())
        # The reference to a seen operation keeps its id from being used for a new one.
        self._seen = {id(op): self._seen.get(id(op), (op, now)) for op in operations}
        return list(self._seen.values())


pending_ops = PendingOps()
"""The registry of this process. Only ranks have a watchdog that reads it."""


class WatchedCall:
    """A blocking MPI call that no group counts; see :class:`PendingOp`.

    Args:
        name: Name of the call, for messages.
        members: World ranks that take part.
        limit_s: Time limit of making a group, in seconds.
    """

    sequence = 0
    slot = 0
    peer = ALL_MEMBERS
    group_number = 0
    is_blocking = False

    def __init__(self, name: str, members: tuple[int, ...], limit_s: float = math.inf) -> None:
        self._name = name
        self.members = members
        self.limit_s = limit_s

    def describe(self) -> str:
        """Return the call in words."""
        return f"{self._name} of {len(self.members)} ranks"

    def overdue(self, waited_s: float) -> str:
        """Return the message about a wait past the limit."""
        ranks = ", ".join(str(rank) for rank in self.members[:_MAX_SHOWN])
        if len(self.members) > _MAX_SHOWN:
            ranks += f" and {len(self.members) - _MAX_SHOWN} more"
        return (
            f"{self._name} of the ranks {ranks} has waited for {waited_s:.0f} s, and the time "
            f"limit of the group is {self.limit_s:g} s: another of these ranks is late, or makes "
            "another group first; make all groups in the same order on all ranks"
        )

    def call(self) -> str:
        """Return "": no arguments are compared."""
        return ""


@dataclass(frozen=True)
class Wait:
    """A wait for other ranks, as ``mpidist doctor --hang`` gets it.

    Attributes:
        what: The wait, in words.
        tasks: The tasks that can end it, such as ``"worker 1"``; () if they are not known.
        since: Its start, in seconds since the epoch.
        slot: Place of an operation of a group in the flight recorder; 0 for other waits.
        is_call: Whether it is a call of a group.
    """

    what: str
    tasks: tuple[str, ...]
    since: float
    slot: int = 0
    is_call: bool = False


waits: dict[int, Wait] = {}
"""The waits of this process, by a key of their own."""


@contextmanager
def waiting_for(what: str, tasks: Iterable[str] = (), since: float | None = None) -> Iterator[None]:
    """Register a wait of this thread, in the block, for ``mpidist doctor --hang``.

    It is for waits that last: an entry costs a microsecond, and is shown after one second.

    Args:
        what: The wait, in words that follow "waits for". The report knows two texts: the main
            thread of a server waits for "requests", and the wait for "the reply to" a call counts
            only if the rank has registered no other.
        tasks: The tasks that can end it, each as job and index, such as ``"worker 1"``.
        since: Start of the wait, in seconds since the epoch; by default now.
    """
    wait = Wait(what, tuple(tasks), time.time() if since is None else since)
    try:
        waits[id(wait)] = wait
        yield
    finally:
        waits.pop(id(wait), None)


@contextmanager
def watched(name: str, group: MPI.Group, limit: float | None = None) -> Iterator[None]:
    """Collective. Register the blocking MPI calls in the block as one pending operation.

    This is for calls that no group counts, such as making and freeing groups and windows. If a
    member leaves without making the call, the watchdog ends the job. No error can be raised in a
    thread that is inside MPI.

    Args:
        name: Name of the call, for messages.
        group: The ranks that take part. It is freed.
        limit: Seconds after which the watchdog ends the job, when the block makes a group. A limit
            below ``MPIDIST_STALL_S`` has the effect of that setting: short limits are meant for
            operations, and ranks may reach this call at different times.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    limit_s = math.inf if limit is None else limit
    call = WatchedCall(name, tuple(int(rank) for rank in ranks), limit_s)
    current = pending_ops.current
    current[id(call)] = call
    try:
        yield
    finally:
        del current[id(call)]


def missing_rank(
    operation: PendingOp,
    since: float,
    left: Mapping[int, float],
    counts: Mapping[int, Mapping[int, int]],
    now: float,
) -> int | None:
    """Return a rank that has left and without which an operation can never complete.

    Args:
        operation: The pending operation.
        since: Time at which the operation was first observed.
        left: Time at which the leave note of each rank that has left arrived.
        counts: For each of these ranks, the number of collectives that it took part in, by group
            number.
        now: The time, on the same clock.

    Returns:
        The world rank, or None if the operation may still complete.
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
        if operation.peer == ALL_MEMBERS:
            grace_s = _ALL_GRACE_S
        elif len(gone) < len(operation.members) - 1:  # this rank waits, so it has not left
            return None
    if not gone:
        return None
    last = max(since, *(left[rank] for rank in gone))
    return gone[0] if now - last > grace_s else None
