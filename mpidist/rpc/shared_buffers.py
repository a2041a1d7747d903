"""Shared memory for large buffers between processes of one host, over mpi and tcp.

The sender copies buffers to its shared buffer, and the receiver uses them in place: one copy at
the speed of memory, made by the sender. MPI copies once as well, but it looks up every page, and
the receiver, which mostly has more to do, makes the copy. A socket copies twice. Buffers that find
no room travel by MPI, or by the socket.

A shared buffer consists of a table with an entry for each page, and the pages. A segment is the
memory of one message. The sender draws a random number for the segment, sets the entry of its first
page to the number, and names both in the frame. The receiver resets the entry once the last view
of the segment is gone. So corrupt frames neither read nor free the segments of other messages.
If the receiver forks while it uses a segment, the segment is never reclaimed, because the child may
still read it.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from mpidist.arena import Arena, Bytes
from mpidist.buffers.copying import copy_array
from mpidist.errors import ResourceExhaustedError
from mpidist.leases import Leases
from mpidist.rpc.codec import UINT8, BadFrameError, as_bytes, split
from mpidist.rpc.message import Array

_PAGE = mmap.PAGESIZE
_CHECKS_PER_WRITE = 8  # segments to check for reclaiming
_MAX_SHARE = 8  # a message takes at most an eighth of the memory
_ENTRY_BYTES = 4
_NO_LIMIT = 1 << 62
_MAX_NUMBER = 1 << 32  # limit of the random numbers of segments
_MAX_PAGES = 1 << 32


_forks = 0  # number of forks, counted before and after each


class SharedBuffer:
    """The memory that one process writes and others read.

    Args:
        memory: Flat uint8, all zero at first.
    """

    def __init__(self, memory: Bytes) -> None:
        count = memory.nbytes // (_PAGE + _ENTRY_BYTES)
        start = -(-count * _ENTRY_BYTES // _PAGE) * _PAGE
        self._entries = memory.data[: count * _ENTRY_BYTES].cast("I")
        self._pages = memory[start:][: count * _PAGE]
        self._max_bytes = memory.nbytes // _MAX_SHARE
        self._arena = Arena(self._pages.nbytes)
        self._segments: deque[int] = deque()
        self._lock = threading.Lock()
        self._leases = Leases(partial(_release, self._entries))
        self._random = random.Random()  # not the generator that scripts seed

    def write(self, buffers: Sequence[Array], limit: int = _NO_LIMIT) -> int | None:
        """Copy C-contiguous arrays to a segment.

        Args:
            buffers: The arrays.
            limit: Upper limit in bytes, beside an eighth of the memory.

        Returns:
            The location of the segment, or None if there is no room.
        """
        nbytes = sum([array.nbytes for array in buffers])
        if nbytes > self._max_bytes or nbytes > limit:
            return None
        with self._lock:
            for checks in (_CHECKS_PER_WRITE, len(self._segments)):
                self._reclaim(checks)
                with suppress(ResourceExhaustedError):
                    start = self._arena.carve(max(-(-nbytes // _PAGE), 1) * _PAGE)
                    break
            else:
                return None
            number = self._random.randrange(1, _MAX_NUMBER)
            self._entries[start // _PAGE] = number
            self._segments.append(start)
        place = start
        try:
            for array in buffers:
                copy_array(self._pages[place : place + array.nbytes], as_bytes(array))
                place += array.nbytes
        except BaseException:  # an interrupt; no receiver will release the segment
            self._entries[start // _PAGE] = 0
            raise
        return number * _MAX_PAGES + start // _PAGE

    def read(self, location: int, sizes: Sequence[int]) -> list[Array]:
        """Return the arrays of a segment, flat uint8. The segment is released with their last view.

        Raises:
            BadFrameError: There is no segment with such arrays.
        """
        number, page = divmod(location, _MAX_PAGES)
        total = sum(sizes)
        inside = page < len(self._entries) and page * _PAGE + total <= self._pages.nbytes
        if not inside or not number or self._entries[page] != number:
            raise BadFrameError(
                f"the shared memory has no segment of {total} bytes at {location:#x}"
            )
        whole = np.frombuffer(self._pages.data, UINT8, total, page * _PAGE)
        self._leases.lend(whole, (page, _forks))
        return split(whole.data, 0, sizes)

    def _reclaim(self, checks: int) -> None:
        """Check the next segments in turn, and free those that the receiver has released."""
        for _ in range(min(len(self._segments), checks)):
            start = self._segments.popleft()
            if self._entries[start // _PAGE]:
                self._segments.append(start)
            else:
                self._arena.free(start)


def _release(entries: memoryview, lease: tuple[int, int]) -> None:
    page, forks = lease
    if forks == _forks:
        entries[page] = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


# Counted before and after a fork, in both processes: a segment that another thread reads during the
# fork then has an old count.
os.register_at_fork(before=_count_fork, after_in_parent=_count_fork, after_in_child=_count_fork)
