"""Pieces of one stretch of memory, and whether the system has the pages for them."""

from __future__ import annotations

import bisect
import ctypes
import errno
import logging
import mmap
import os
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.dev_shm import SHARED_MEMORY, shared_memory_space
from mpidist.errors import ResourceExhaustedError

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64  # a cache line
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14; Python does not name it
_REMOVE = 9  # MADV_REMOVE
# What is left to others where free space can only be looked up: they take theirs meanwhile.
_MARGIN_BYTES = 16 << 20


class Arena:
    """Pieces carved from one stretch of memory: first fit, neighbours joined when freed.

    Args:
        nbytes: Length of the stretch.
        memory: The stretch itself, flat uint8. If it is given, a piece has all its pages when it
            is carved: writing to it cannot fail any more.
    """

    def __init__(self, nbytes: int, memory: Bytes | None = None) -> None:
        self._nbytes = nbytes
        self._memory = memory
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []
        self._carved: dict[int, int] = {}

    def carve(self, nbytes: int) -> int:
        """Local. Reserve a piece.

        Args:
            nbytes: Its length, at least 0.

        Returns:
            Its offset, a multiple of 64.

        Raises:
            ResourceExhaustedError: No free piece is long enough, or the system has no pages for it.
        """
        length = padded(nbytes)
        for index, (start, free) in enumerate(self._free):
            if free >= length:
                rest = (start + length, free - length)
                self._free[index : index + 1] = [rest] if rest[1] else []
                self._carved[start] = length
                self._commit(start, length)
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

    def _commit(self, start: int, length: int) -> None:
        if self._memory is None:
            return
        try:
            commit(self._memory[start : start + length])
        except BaseException:
            self.free(start)
            raise


def padded(nbytes: int) -> int:
    """Local. What a piece of so many bytes takes from its arena."""
    return max(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)


def commit(memory: Bytes, path: str = SHARED_MEMORY) -> None:
    """Local. Have the pages of a stretch of sparse memory, or an error in place of SIGBUS.

    Linux before 5.14 cannot be asked for pages. There the free space of the file system is looked
    up, with a margin of 16 MiB: no proof, since others may take it before it is written to.

    Args:
        memory: Flat uint8, in a mapping that this process may write to.
        path: The file system that shared memory lives in.

    Raises:
        ResourceExhaustedError: The system does not have them; those that it had are given back.
    """
    if not memory.nbytes:
        return
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    problem = populate(begin, end - begin)
    if problem == 0:
        return
    free, total = shared_memory_space(path)
    if problem == errno.EINVAL and free >= memory.nbytes + _MARGIN_BYTES:
        return
    if problem not in (errno.EINVAL, errno.EFAULT, errno.ENOMEM):
        raise OSError(problem, f"cannot commit memory: {os.strerror(problem)}")
    # Whole pages of this stretch alone: those at its ends may hold what lies beside it.
    inner = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    behind = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if behind > inner:
        _madvise(inner, behind - inner, _REMOVE)  # private memory refuses, and needs it not
    raise ResourceExhaustedError(
        f"the system has no {memory.nbytes} bytes of memory left for a piece of an arena: "
        f"{path} has {free >> 20} MiB free of {total >> 20}"
    )


def arena_bytes(wanted: int, owners: int, path: str = SHARED_MEMORY) -> int:
    """Local. How large an arena each of several ranks of this node can have.

    Args:
        wanted: Bytes that each would like.
        owners: How many ranks of the node have one.
        path: The file system that shared memory lives in.

    Returns:
        At most half of what is free there, divided by the owners, in whole pages; a cut below
        what is wanted is logged.
    """
    free, _ = shared_memory_space(path)
    limit = free // 2 // owners
    if limit < wanted:
        logger.info(
            "arena of %d MiB in place of %d: %s has %d MiB free for %d ps task(s) of this node",
            limit >> 20,
            wanted >> 20,
            path,
            free >> 20,
            owners,
        )
    return min(wanted, limit) // mmap.PAGESIZE * mmap.PAGESIZE


def populate(address: int, nbytes: int) -> int:
    """Local. Ask for all pages of a mapping, of which some may have been taken already.

    Returns:
        0, or the number of the error: EFAULT where there are none left, EINVAL before Linux 5.14.
    """
    return _madvise(address, nbytes, _POPULATE_WRITE)


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """0, or the number of the error."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0
