"""One-sided memory: allocated once, read and written by others without the owner's help."""

from __future__ import annotations

import bisect
import logging
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpidist.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64  # a cache line
# Address space without a promise of memory: Linux refuses promises larger than what it has.
# Python names the flag from 3.13 on.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Window:
    """Memory of the ranks of one node, mapped by all of them.

    The memory is sparse: pages are committed when they are first written. The window is locked
    for its whole life, so that loads and stores need nothing but :meth:`sync` (MPI 4.1, 12.7.4).

    Use :meth:`shared` or :meth:`private`.

    Args:
        parts: The memory of each rank of the node.
        own: Which part is this rank's.
        win: MPI's window, or None for private memory.
    """

    def __init__(self, parts: list[Bytes], own: int, win: MPI.Win | None) -> None:
        self._parts = parts
        self._own = own
        self._win = win

    @classmethod
    def shared(cls, comm: MPI.Intracomm, nbytes: int) -> Window:
        """Collective over ``comm``. Map the memory of all its ranks.

        Args:
            comm: Ranks of one node.
            nbytes: Size of this rank's part; may be 0.

        Returns:
            The window.
        """
        from mpi4py import MPI

        win = MPI.Win.Allocate_shared(nbytes, 1, comm=comm)
        win.Lock_all(MPI.MODE_NOCHECK)
        parts = [_as_array(win.Shared_query(rank)[0]) for rank in range(comm.size)]
        return cls(parts, comm.rank, win)

    @classmethod
    def private(cls, nbytes: int) -> Window:
        """Local. Memory that only threads of this process share; just as sparse."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        memory = mmap.mmap(-1, max(nbytes, 1), flags)
        return cls([np.frombuffer(memory, np.uint8)[:nbytes]], 0, None)

    @property
    def local(self) -> Bytes:
        """This rank's part, flat uint8."""
        return self._parts[self._own]

    def part(self, rank: int) -> Bytes:
        """Local. The part of a rank of the window's communicator, flat uint8."""
        return self._parts[rank]

    def sync(self) -> None:
        """Local. Order this rank's loads and stores before the call against those after it."""
        if self._win is not None:
            self._win.Sync()

    def free(self) -> None:
        """Collective. Give the memory back; no view of it may be used afterwards."""
        self._parts = []
        if self._win is not None:
            self._win.Unlock_all()
            self._win.Free()
            self._win = None


class Arena:
    """Pieces carved from one stretch of memory: first fit, neighbours joined when freed.

    Args:
        nbytes: Length of the stretch.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []
        self._carved: dict[int, int] = {}

    def carve(self, nbytes: int) -> int:
        """Local. Reserve a piece.

        Args:
            nbytes: Its length, at least 0.

        Returns:
            Its offset, a multiple of 64.

        Raises:
            ResourceExhaustedError: No free piece is long enough.
        """
        length = max(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
        for index, (start, free) in enumerate(self._free):
            if free >= length:
                rest = (start + length, free - length)
                self._free[index : index + 1] = [rest] if rest[1] else []
                self._carved[start] = length
                return start
        raise ResourceExhaustedError(
            f"no room for {nbytes} bytes in an arena of {self._nbytes}, of which "
            f"{sum(free for _, free in self._free)} are free: start with a larger one "
            "(MPIDIST_ARENA_BYTES; it is capped at half of the free /dev/shm) or more ps tasks"
        )

    def free(self, offset: int) -> None:
        """Local. Give a piece back.

        Raises:
            KeyError: No piece begins there.
        """
        length = self._carved.pop(offset)
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free.pop(index - 1)
            index, length = index - 1, length + before
        self._free.insert(index, (offset, length))


def arena_bytes(wanted: int, owners: int, path: str = "/dev/shm") -> int:
    """Local. How large an arena each of several ranks of this node can have.

    Args:
        wanted: Bytes that each would like.
        owners: How many ranks of the node have one.
        path: The file system that shared memory lives in.

    Returns:
        At most half of what is free there, divided by the owners, in whole pages; a cut below
        what is wanted is logged.
    """
    stat = os.statvfs(path)
    limit = stat.f_bavail * stat.f_frsize // 2 // owners
    if limit < wanted:
        logger.info(
            "arena of %d MiB in place of %d: %s has %d MiB free for %d ps task(s) of this node",
            limit >> 20,
            wanted >> 20,
            path,
            stat.f_bavail * stat.f_frsize >> 20,
            owners,
        )
    return min(wanted, limit) // mmap.PAGESIZE * mmap.PAGESIZE


def _as_array(buffer: Any) -> Bytes:
    return np.frombuffer(buffer, np.uint8) if len(buffer) else np.empty(0, np.uint8)
