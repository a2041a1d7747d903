"""Where a server's variables lie: segments that workers reach, or memory of its own."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mpidist import Window, errors
from mpidist.arena import Arena
from mpidist.host_memory import check_free
from strategy.shared.host import Host

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Where some pieces lie together.

    Attributes:
        memory: What they lie in.
        offsets: Of each piece in it, in bytes.
        segment: Number of the segment that it is, or None: only the server can reach it.
        one_sided: Whether workers reach the segment by MPI's Get and Put, and do not map it.
    """

    memory: Bytes
    offsets: tuple[int, ...]
    segment: int | None
    one_sided: bool = False

    def is_reached(self, one_sided: bool) -> bool:
        """Local. Whether workers of this transport reach it without asking the server."""
        return self.segment is not None and self.one_sided == one_sided


class Memory:
    """The segments of a server, and pieces carved from them.

    Args:
        host: The server's process.
    """

    def __init__(self, host: Host) -> None:
        self._segments: list[tuple[Bytes, Arena, bool]] = []
        self.add(host.memory.own(), one_sided=False)

    @property
    def count(self) -> int:
        """Number of segments; that of the next one."""
        return len(self._segments)

    def nbytes(self, one_sided: bool) -> int:
        """Local. Length of all segments of a kind."""
        return sum(memory.nbytes for memory, _, kind in self._segments if kind == one_sided)

    def add(self, memory: Bytes, one_sided: bool) -> None:
        """Local. Have a further segment."""
        self._segments.append((memory, Arena(memory.nbytes, memory), one_sided))

    def carve(self, *lengths: int, one_sided: bool) -> Place:
        """Local. Reserve pieces of one segment, with all their pages.

        Args:
            lengths: Of each, in bytes.
            one_sided: Of which kind the segment must be.

        Raises:
            ResourceExhaustedError: No segment has room.
        """
        problem = errors.ResourceExhaustedError("the server has no segment of this kind yet")
        for number, (memory, arena, kind) in enumerate(self._segments):
            if kind != one_sided:
                continue
            offsets: list[int] = []
            try:
                offsets.extend(arena.carve(length) for length in lengths)  # those before an error
            except errors.ResourceExhaustedError as error:
                problem = error
                for offset in offsets:
                    arena.free(offset)
            else:
                return Place(memory, tuple(offsets), number, one_sided)
        raise problem

    @staticmethod
    def carve_private(*lengths: int) -> Place:
        """Local. Pieces in memory of this process alone.

        Raises:
            ResourceExhaustedError: The host has no memory for them.
        """
        nbytes = needed_bytes(*lengths)
        memory = Window.private(nbytes).local
        arena = Arena(nbytes, memory)
        return Place(memory, tuple(arena.carve(length) for length in lengths), None)


def paged_bytes(nbytes: int) -> int:
    """Local. How long a piece must be for so many bytes to have whole pages of their own in it."""
    return (-(-nbytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE


def on_whole_pages(place: Place, piece: int) -> Place:
    """Local. A place in which one piece, of :func:`paged_bytes`, begins with a page."""
    offsets = list(place.offsets)
    address = place.memory.ctypes.data + offsets[piece]
    offsets[piece] += -address % mmap.PAGESIZE
    return replace(place, offsets=tuple(offsets))


def check_room(nbytes: int) -> None:
    """Local. ResourceExhaustedError where the system would begin, and in the end kill a process."""
    check_free(nbytes, "divide the variable by a partitioner, over ps tasks of more hosts")


def needed_bytes(*lengths: int) -> int:
    """Local. What a segment must have for pieces of these lengths."""
    return sum(max(-(-length // _ALIGNMENT), 1) * _ALIGNMENT for length in lengths)
