"""How each way between GPUs is made for a group, and why it may not be there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.cuda import Way, bus_id, device_memory_by_mpi_on
from mpidist.cuda.ways.ipc_way import Ipc
from mpidist.cuda.ways.nccl import Nccl, unique_id, why_not
from mpidist.cuda.ways.reductions import MOST
from mpidist.group.device_mpi import DeviceMpi
from mpidist.group.pieces import Pieces
from mpidist.group.process_group import ProcessGroup
from mpidist.runtime import together, world


class WayMaker(ABC):
    """Makes one way for the members of a group.

    Args:
        group: Whose.
        number: Of the GPU of this member.
    """

    def __init__(self, group: ProcessGroup, number: int) -> None:
        self.group = group
        self.number = number

    def why_not(self) -> str | None:
        """Collective. Why this member cannot go it; None if it can."""
        return None

    def place(self) -> Any:
        """Local. What the others have to know of this member."""
        return None

    def why_not_together(self, places: Sequence[Any]) -> str | None:
        """Local. Why the members cannot go it, by their places; the same on all."""
        return None

    @abstractmethod
    def make(self) -> Way:
        """Collective. The way."""


class _NcclMaker(WayMaker):
    """NCCL, which wants a GPU for each rank."""

    def why_not(self) -> str | None:
        return why_not()

    def place(self) -> tuple[int, str]:
        return _node(self.group), bus_id(self.number)

    def why_not_together(self, places: Sequence[Any]) -> str | None:
        if len(set(places)) == len(places):
            return None
        return "it wants a GPU for each rank, and some share one"

    def make(self) -> Way:
        told: list[Any] = [None]
        if self.group.rank() == 0:
            try:
                told = [unique_id()]
            except Exception as error:  # which the others are to learn
                told = [error]
        self.group.broadcast_object_list(told, group_src=0)
        if isinstance(told[0], Exception):
            raise told[0]
        with together("meeting in NCCL", self.group.comm.Get_group()):
            return Nccl(self.group.size(), self.group.rank(), told[0], self.number)


class _IpcMaker(WayMaker):
    """CUDA IPC, which is for the ranks of one node."""

    def place(self) -> int:
        return _node(self.group)

    def why_not_together(self, places: Sequence[Any]) -> str | None:
        if len(places) == 1:
            return "there is one rank only"
        if len(places) > MOST:
            return f"it is for {MOST} ranks at most, and these are {len(places)}"
        return None if len(set(places)) == 1 else "its ranks are on several nodes"

    def make(self) -> Way:
        group = self.group

        def exchange(record: bytes) -> list[bytes]:
            records: list[Any] = [None] * group.size()
            group.all_gather_object(records, record)
            return records

        def meet(is_well: bool) -> bool:
            all_well = np.array([is_well])
            group.all_reduce(all_well, "min")
            return bool(all_well[0])

        return Ipc(group.size(), group.rank(), self.number, exchange, meet)


class _MpiMaker(WayMaker):
    """An MPI that takes memory of devices."""

    def why_not(self) -> str | None:
        from mpi4py import MPI

        node = self.group.comm.Split_type(MPI.COMM_TYPE_SHARED)
        found = device_memory_by_mpi_on(node)
        node.Free()
        if self.group.timeout is not None:
            return "operations with a time limit do not block, and few MPI have those on GPUs"
        return None if found.usable else found.reason

    def make(self) -> Way:
        return DeviceMpi(self.group, self.number)


class _PiecesMaker(WayMaker):
    """The host, in pieces."""

    def make(self) -> Way:
        return Pieces(self.group, self.number)


MAKERS: dict[str, type[WayMaker]] = {
    "nccl": _NcclMaker,
    "ipc": _IpcMaker,
    "mpi": _MpiMaker,
    "pieces": _PiecesMaker,
}
"""By the names of the ways, in the order in which they are looked for."""


def _node(group: ProcessGroup) -> int:
    return world().nodes[group.ranks[group.rank()]]
