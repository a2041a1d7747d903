"""Where a server's variables lie: segments that node-mates map, or memory of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpidist import Arena, Window, errors
from strategy.host import Host

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64


@dataclass(frozen=True)
class Place:
    """Where some pieces lie together.

    Attributes:
        memory: What they lie in.
        offsets: Of each piece in it, in bytes.
        segment: Number of the segment that it is, or None: only the server can reach it.
    """

    memory: Bytes
    offsets: tuple[int, ...]
    segment: int | None


class Memory:
    """The segments of a server, and pieces carved from them.

    Args:
        host: The server's process.
    """

    def __init__(self, host: Host) -> None:
        self._segments: list[tuple[Bytes, Arena]] = []
        self.add(host.memory.own())

    @property
    def count(self) -> int:
        """Number of segments; that of the next one."""
        return len(self._segments)

    @property
    def nbytes(self) -> int:
        """Length of all segments."""
        return sum(memory.nbytes for memory, _ in self._segments)

    def add(self, memory: Bytes) -> None:
        """Local. Have a further segment."""
        self._segments.append((memory, Arena(memory.nbytes, memory)))

    def carve(self, *lengths: int) -> Place:
        """Local. Reserve pieces of one segment, with all their pages.

        Args:
            lengths: Of each, in bytes.

        Raises:
            ResourceExhaustedError: No segment has room.
        """
        problem: errors.ResourceExhaustedError | None = None
        for number, (memory, arena) in enumerate(self._segments):
            offsets: list[int] = []
            try:
                offsets.extend(arena.carve(length) for length in lengths)  # those before an error
            except errors.ResourceExhaustedError as error:
                problem = error
                for offset in offsets:
                    arena.free(offset)
            else:
                return Place(memory, tuple(offsets), number)
        assert problem is not None
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


def needed_bytes(*lengths: int) -> int:
    """Local. What a segment must have for pieces of these lengths."""
    return sum(max(-(-length // _ALIGNMENT), 1) * _ALIGNMENT for length in lengths)
