"""Memory through which large buffers travel between processes that share it.

The sender copies them to its shelf, and the receiver uses them where they lie: one copy, made by
who sends, at the speed of memory. MPI copies once as well, but looks up every page, and the
receiver, which mostly has more to do, makes the copy. A socket copies twice. What finds no room
goes by MPI, or by the socket.

A shelf is a table with a number for each page, and the pages. From when the sender puts a piece
there the number of its first page is the piece's own, drawn at random, which the frame tells; the
receiver sets it to 0 when the last view is gone. So bytes that are no message neither take nor free
what is another's. What is lent when a process forks is never given back: the child sees it, too.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from mpidist.arena import Arena, Bytes
from mpidist.copying import copy_array
from mpidist.endpoint.frames import BadFrameError, split
from mpidist.endpoint.message import UINT8, Array, as_bytes
from mpidist.errors import ResourceExhaustedError
from mpidist.leases import Leases

_PAGE = mmap.PAGESIZE
_MOST_LOOKS = 8  # at pieces, for each that is put there
_REFUSALS = 16  # after so many, look at all pieces
_LARGEST_PART = 8  # of all memory
_ENTRY_BYTES = 4
_NO_LIMIT = 1 << 62
_PIECES = 1 << 32
_MOST_PAGES = 1 << 32


# All of this process.
_shelves: weakref.WeakSet[Shelf] = weakref.WeakSet()
_adding = threading.Lock()


class Shelf:
    """One process's shelf; it puts itself, others take.

    Args:
        memory: Flat uint8; at first all zero.
    """

    def __init__(self, memory: Bytes) -> None:
        count = memory.nbytes // (_PAGE + _ENTRY_BYTES)
        start = -(-count * _ENTRY_BYTES // _PAGE) * _PAGE
        self._owners = memory.data[: count * _ENTRY_BYTES].cast("I")
        self._pages = memory[start:][: count * _PAGE]
        self._largest = memory.nbytes // _LARGEST_PART
        self._arena = Arena(self._pages.nbytes)
        self._lying: deque[int] = deque()
        self._lock = threading.Lock()
        self._kept: set[int] = set()
        self._leases = Leases(partial(_give_back, self._owners, self._kept))
        self._random = random.Random()  # not the one that scripts seed
        self._refusals = 0
        with _adding:
            _shelves.add(self)

    def put(self, buffers: Sequence[Array], limit: int = _NO_LIMIT) -> int | None:
        """Local. Copy C-contiguous arrays; where they lie, or None if there is no room.

        Args:
            buffers: The arrays.
            limit: Bytes; what is more is not put there, nor what is an eighth of the shelf.
        """
        nbytes = sum([array.nbytes for array in buffers])
        if nbytes > self._largest or nbytes > limit:
            return None
        with self._lock:
            self._clear_away(_MOST_LOOKS)
            place = self._carve(nbytes)
            if place is None:
                return None
            piece = self._random.randrange(1, _PIECES)
            self._owners[place // _PAGE] = piece
            self._lying.append(place)
        start = place
        for array in buffers:
            copy_array(self._pages[start : start + array.nbytes], as_bytes(array))
            start += array.nbytes
        return piece * _MOST_PAGES + place // _PAGE

    def take(self, place: int, sizes: Sequence[int]) -> list[Array]:
        """Local. The arrays that lie somewhere, flat uint8; the memory is theirs until they die.

        Raises:
            BadFrameError: No arrays of such sizes lie there.
        """
        piece, number = divmod(place, _MOST_PAGES)
        total = sum(sizes)
        inside = number < len(self._owners) and number * _PAGE + total <= self._pages.nbytes
        if not inside or not piece or self._owners[number] != piece:
            raise BadFrameError(f"no {total} bytes of it lie at {place:#x} in the shared memory")
        whole = np.frombuffer(self._pages.data, UINT8, total, number * _PAGE)
        self._leases.lend(whole, number)
        return split(whole.data, 0, sizes)

    def _carve(self, nbytes: int) -> int | None:
        length = max(-(-nbytes // _PAGE), 1) * _PAGE
        for _ in range(2):
            try:
                return self._arena.carve(length)
            except ResourceExhaustedError:
                self._refusals += 1
                if self._refusals % _REFUSALS != 1:
                    break
                self._clear_away(len(self._lying))
        return None

    def _clear_away(self, looks: int) -> None:
        """Free what has been given back among so many pieces."""
        for _ in range(min(len(self._lying), looks)):
            place = self._lying.popleft()
            if self._owners[place // _PAGE]:
                self._lying.append(place)
            else:
                self._arena.free(place)

    def keep(self) -> None:
        """Local. Never give back what is lent now: a child that is forked sees it, too."""
        self._kept.update(self._leases.lent())


def _give_back(owners: memoryview, kept: set[int], number: int) -> None:
    if number not in kept:
        owners[number] = 0


def _before_fork() -> None:
    _adding.acquire()  # until it is done: a child must not find it locked by another thread
    for shelf in list(_shelves):
        shelf.keep()


os.register_at_fork(
    before=_before_fork, after_in_parent=_adding.release, after_in_child=_adding.release
)
