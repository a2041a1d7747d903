"""Memory through which large buffers travel between the ranks of a node.

The sender copies them to its shelf, and the receiver uses them where they lie: one copy, made by
who sends, at the speed of memory. MPI copies once as well, but looks up every page, and the
receiver, which mostly has more to do, makes the copy. What finds no room goes by MPI.

A shelf is a table with a byte for each page, and the pages. The byte of a piece's first page is 1
from when the sender puts it there until the receiver, when the last view of it is gone, sets it
back.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from mpidist.arena import Arena, Bytes
from mpidist.endpoint.frames import BadFrameError, split
from mpidist.endpoint.leases import Leases
from mpidist.endpoint.message import UINT8, Array, as_bytes
from mpidist.errors import ResourceExhaustedError

_PAGE = mmap.PAGESIZE
_MOST_LOOKS = 8


class Shelf:
    """One rank's shelf; the rank itself puts, the others of its node take.

    Args:
        memory: Flat uint8; at first all zero.
    """

    def __init__(self, memory: Bytes) -> None:
        count = memory.nbytes // (_PAGE + 1)
        start = -(-count // _PAGE) * _PAGE
        self._taken = memory.data[:count]
        self._pages = memory[start:][: count * _PAGE]
        self._arena = Arena(self._pages.nbytes)
        self._lying: deque[int] = deque()
        self._lock = threading.Lock()
        self._leases = Leases(self._give_back)

    def put(self, buffers: Sequence[Array]) -> int | None:
        """Local. Copy C-contiguous arrays to one piece; its offset, or None if there is no room."""
        nbytes = sum([array.nbytes for array in buffers])
        with self._lock:
            self._clear_away()
            try:
                place = self._arena.carve(max(-(-nbytes // _PAGE), 1) * _PAGE)
            except ResourceExhaustedError:
                return None
            self._taken[place // _PAGE] = 1
            self._lying.append(place)
        start = place
        for array in buffers:
            self._pages[start : start + array.nbytes] = as_bytes(array)
            start += array.nbytes
        return place

    def take(self, place: int, sizes: Sequence[int]) -> list[Array]:
        """Local. The arrays that lie at an offset, flat uint8; they keep it until they are gone.

        Raises:
            BadFrameError: No arrays of such sizes lie there.
        """
        number, total = place // _PAGE, sum(sizes)
        if place % _PAGE or place + total > self._pages.nbytes or not self._taken[number]:
            raise BadFrameError(f"nothing of {total} bytes lies at {place} in the shared memory")
        whole = np.frombuffer(self._pages.data, UINT8, total, place)
        self._leases.lend(whole, number)
        return split(whole.data, 0, sizes)

    def _clear_away(self) -> None:
        """Free what has been given back; of many pieces, look at some."""
        for _ in range(min(len(self._lying), _MOST_LOOKS)):
            place = self._lying.popleft()
            if self._taken[place // _PAGE]:
                self._lying.append(place)
            else:
                self._arena.free(place)

    def _give_back(self, number: int) -> None:
        self._taken[number] = 0
