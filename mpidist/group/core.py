"""What a process group is, and how its operations are carried out."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from mpidist.errors import DeadlineExceededError, GroupBrokenError
from mpidist.executor import HostExecutor, RequestWork, backend_error
from mpidist.op import Op
from mpidist.runtime import Waits, World, exits, together, world
from mpidist.work import Timeout, seconds

if TYPE_CHECKING:
    from mpi4py import MPI

_counter = itertools.count()


class Core:
    """Collective. The members of a group, their communicator, and the way of every operation.

    Args:
        comm: The communicator; the group owns it from now on.
        name: For messages.
        timeout: Time limit of every operation, in seconds or as a timedelta; None for none.

    Attributes:
        name: For messages.
        number: Unique, and equal on all members.
        ranks: World rank of each member.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: Timeout = None) -> None:
        from mpi4py import MPI

        here: World = world()
        self._comm = comm
        self._mpi_error = MPI.Exception
        self._executor = HostExecutor(comm)
        self._waits: Waits = exits().waits
        self._timeout = seconds(timeout)
        self._sequence = 0
        self._late: RequestWork | None = None
        self._freed = False
        self._abandoned: list[RequestWork] = []
        self._rank, self._size = comm.rank, comm.size
        self.name = name
        with together(f"making group {name!r}", comm.Get_group()):
            self.number: int = comm.bcast(next(_counter) * here.size + here.rank)
        group = comm.Get_group()
        translated = group.Translate_ranks(list(range(comm.size)), here.comm.Get_group())
        self.ranks = tuple(int(rank) for rank in translated)
        group.Free()
        self._position = {rank: position for position, rank in enumerate(self.ranks)}

    def rank(self) -> int:
        """Local. Rank of this process in the group."""
        return self._rank

    def size(self) -> int:
        """Local. Number of members."""
        return self._size

    def position(self, rank: int) -> int:
        """Local. Group rank of a rank of the world; ValueError if it is not a member."""
        return self._peer(rank, None)

    def set_timeout(self, timeout: Timeout) -> None:
        """Local. Time limit of every later operation, seconds or a timedelta; None for none."""
        self._timeout = seconds(timeout)

    @property
    def comm(self) -> MPI.Intracomm:
        """Local. The group's mpi4py communicator; operations on it do not mix with the group's."""
        return self._comm

    def free(self) -> None:
        """Collective. Give the communicator back; every later operation is a ValueError.

        Raises:
            ValueError: That has been done.
        """
        self._check_alive()
        self._freed = True
        with together(f"freeing group {self.name!r}", self._comm.Get_group()):
            self._comm.Free()

    # Inside

    def _collective(
        self, op: Op, async_op: bool, timeout: float | None = None
    ) -> RequestWork | None:
        if self._late is not None:
            self._check_late()
        self._sequence = op.sequence = self._sequence + 1
        self._waits.counts[self.number] = op.sequence
        if async_op:
            return self._begin(op)
        self._carry_out(op, timeout)
        return None

    def _carry_out(self, op: Op, timeout: float | None = None) -> int:
        """Carry an Op out; group rank of the other side of a message."""
        limit = self._timeout if timeout is None else timeout
        if limit is not None:
            return self._carry_out_within(op, limit)
        current = self._waits.current
        current[id(op)] = op
        try:
            self._executor.run(op)
        except self._mpi_error as error:
            self._check_alive()
            raise backend_error(op, error) from error
        finally:
            del current[id(op)]
        if op.finish is not None:
            op.finish()
        return op.root

    def _carry_out_within(self, op: Op, limit: float) -> int:
        work = self._begin(op)
        try:
            work.wait(limit)
        except DeadlineExceededError:
            if op.sequence:
                self._late = work
            else:
                self._abandoned = [w for w in self._abandoned if not w.is_completed()] + [work]
            raise DeadlineExceededError(
                f"{op.describe()} has not completed within {limit:g} s on rank "
                f"{self.ranks[self._rank]}; it stays pending, and its arrays must not be used"
            ) from None
        sender = work.result()
        return op.root if sender is None else self._position[sender]

    def _begin(self, op: Op) -> RequestWork:
        try:
            return RequestWork(op, self._executor.start(op), self._waits)
        except self._mpi_error as error:
            self._check_alive()
            raise backend_error(op, error) from error

    def _check_alive(self) -> None:
        if self._freed:
            raise ValueError(f"group {self.name!r} was destroyed and cannot be used any more")

    def _check_late(self) -> None:
        if self._late is not None and not self._late.is_completed():
            raise GroupBrokenError(
                f"group {self.name!r} takes no collective on rank {self.ranks[self._rank]}: its "
                f"{self._late.name} is past its time limit and still pending; wait until the "
                "missing ranks have joined it, or make a new group of those that answer"
            )
        self._late = None

    def _peer(self, rank: int | None, group_rank: int | None, default: int | None = None) -> int:
        """Group rank of the other side, from either way to name it."""
        if rank is not None and group_rank is not None:
            raise ValueError("give the world rank or the group rank of the other side, not both")
        if rank is not None:
            position = self._position.get(rank, -1)
        elif group_rank is not None:
            position = group_rank if 0 <= group_rank < self._size else -1
        elif default is not None:
            return default
        else:
            raise ValueError("the rank of the other side is missing")
        if position < 0:
            named = f"world rank {rank!r}" if rank is not None else f"group rank {group_rank!r}"
            raise ValueError(f"{named} is not in group {self.name!r}, whose ranks are {self.ranks}")
        return position
