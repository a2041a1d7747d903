"""The memory of a server: segments that workers read, and blocks allocated in them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace

from mpidist import errors
from mpidist.arena import Arena
from mpidist.host_memory import check_free
from mpidist.ps_memory import PsMemory, Segment
from strategy.protocol.cluster import Bytes

_ALIGNMENT = 64
_MIN_SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True)
class Place:
    """The location of some blocks in a segment.

    Attributes:
        segment: The segment.
        offsets: Offset of each block in bytes.
    """

    segment: Segment
    offsets: tuple[int, ...]

    @property
    def memory(self) -> Bytes:
        """The memory of the segment."""
        return self.segment.memory


@dataclass(eq=False)
class _Pool:
    """A segment, its allocator, and its address for MPI's Get; 0 before it is attached."""

    segment: Segment
    arena: Arena = field(init=False)
    address: int = 0

    def __post_init__(self) -> None:
        self.arena = Arena(self.segment.memory.nbytes, self.segment.memory)


class Memory:
    """The segments of a server. Each further segment doubles their size.

    Args:
        source: Allocates segments.
    """

    def __init__(self, source: PsMemory) -> None:
        self._source = source
        self._pools: list[_Pool] = []
        self._attached = False

    def carve(self, *lengths: int) -> Place:
        """Allocate blocks in one segment, with all their pages.

        Args:
            lengths: Size of each block in bytes.

        Raises:
            ResourceExhaustedError: The host, container or batch job has no memory left.
        """
        check_room(sum(lengths))
        for pool in self._pools:
            offsets: list[int] = []
            try:
                offsets.extend(pool.arena.carve(length) for length in lengths)
            except errors.ResourceExhaustedError:
                for offset in offsets:  # those before the error
                    pool.arena.free(offset)
            else:
                return Place(pool.segment, tuple(offsets))
        pool = self._add(needed_bytes(*lengths))
        return Place(pool.segment, tuple(pool.arena.carve(length) for length in lengths))

    def attach(self) -> None:
        """Attach all segments, and later ones, for workers that read by MPI's Get."""
        self._attached = True
        for pool in self._pools:
            pool.address = pool.address or self._source.attach(pool.segment)

    def address_of(self, segment: Segment) -> int:
        """Return the address of a segment for MPI's Get, or 0 if it is not attached."""
        return next(pool.address for pool in self._pools if pool.segment is segment)

    def _add(self, needed: int) -> _Pool:
        """Allocate a segment with room for ``needed`` bytes."""
        total = sum(pool.segment.memory.nbytes for pool in self._pools)
        for nbytes in (max(needed, total, _MIN_SEGMENT_BYTES), needed):
            try:
                pool = _Pool(self._source.allocate(nbytes))
                break
            except OSError as error:  # of a limit to the address space of a process
                problem = error
        else:
            raise errors.ResourceExhaustedError(
                f"its process cannot have {needed} bytes more ({problem}): divide the variable by "
                "a partitioner, over more ps tasks"
            ) from problem
        if self._attached:
            pool.address = self._source.attach(pool.segment)
        self._pools.append(pool)
        return pool


def paged_bytes(nbytes: int) -> int:
    """Return the size of a block that contains whole pages of its own for ``nbytes``."""
    return (-(-nbytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE


def on_whole_pages(place: Place, block: int) -> Place:
    """Return the place with one block, of :func:`paged_bytes`, moved to the begin of a page."""
    offsets = list(place.offsets)
    address = place.memory.ctypes.data + offsets[block]
    offsets[block] += -address % mmap.PAGESIZE
    return replace(place, offsets=tuple(offsets))


def check_room(nbytes: int) -> None:
    """Raise ResourceExhaustedError if the host, container or batch job has less memory left."""
    check_free(nbytes, "divide the variable by a partitioner, over ps tasks of more hosts")


def needed_bytes(*lengths: int) -> int:
    """Return the size of a segment for blocks of these lengths."""
    return sum(max(-(-length // _ALIGNMENT), 1) * _ALIGNMENT for length in lengths)
