"""Collectives that belong to no group's count: making and freeing groups and windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpidist.runtime.exits import exits, installed
from mpidist.runtime.waits import ALL

if TYPE_CHECKING:
    from mpi4py import MPI


class _Together:
    """What the watchdog knows of one; see :class:`mpidist.runtime.waits.Waiting`."""

    sequence = 0
    peer = ALL
    group_number = 0

    def __init__(self, what: str, members: tuple[int, ...]) -> None:
        self._what = what
        self.members = members

    def describe(self) -> str:
        """Local. The operation, in words."""
        return f"{self._what} of {len(self.members)} ranks"

    def call(self) -> str:
        """Return "": such operations have no arguments that are compared."""
        return ""


@contextmanager
def together(what: str, group: MPI.Group) -> Iterator[None]:
    """Collective over a group's ranks. Have the watchdog look after what MPI does in the block.

    A rank that leaves without coming here ends the job, and a long wait is reported; but not where
    the script has started MPI itself and nothing of the library needed a world yet.

    Args:
        what: What is done, for messages.
        group: The ranks that take part; it is freed.
    """
    if not installed():
        group.Free()
        yield
        return
    ranks = group.Translate_ranks(None, exits().world.comm.Get_group())
    group.Free()
    operation = _Together(what, tuple(int(rank) for rank in ranks))
    current = exits().waits.current
    current[id(operation)] = operation
    try:
        yield
    finally:
        del current[id(operation)]
