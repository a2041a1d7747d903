"""An allocator within one memory region, which also commits the pages."""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.errors import ResourceExhaustedError

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64  # a cache line
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14; Python does not name it
_REMOVE = 9  # MADV_REMOVE


class Arena:
    """A first-fit allocator of blocks in one memory region. Free neighbours are joined.

    Args:
        nbytes: Size of the region.
        memory: The region, flat uint8. If it is given, the pages of a block are committed with the
            allocation, so that writing to it cannot fail.
    """

    def __init__(self, nbytes: int, memory: Bytes | None = None) -> None:
        self._nbytes = nbytes
        self._memory = memory
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []
        self._carved: dict[int, int] = {}

    def carve(self, nbytes: int) -> int:
        """Allocate a block.

        Args:
            nbytes: Size of the block, at least 0.

        Returns:
            The offset of the block, a multiple of 64.

        Raises:
            ResourceExhaustedError: No free block is large enough, or the system has no pages.
        """
        length = max(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
        for index, (start, free) in enumerate(self._free):
            if free >= length:
                rest = (start + length, free - length)
                self._free[index : index + 1] = [rest] if rest[1] else []
                self._carved[start] = length
                self._commit(start, length)
                return start
        raise ResourceExhaustedError(
            f"no room for {nbytes} bytes in an arena of {self._nbytes}, of which "
            f"{sum(free for _, free in self._free)} are free"
        )

    def free(self, offset: int) -> None:
        """Free a block.

        Raises:
            KeyError: No block begins at the offset.
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


def commit(memory: Bytes) -> None:
    """Commit the pages of sparse memory, so that a shortage is an error and not a SIGBUS.

    Linux before 5.14 has no such call. There nothing is committed: callers check the free memory of
    the host before.

    Args:
        memory: Flat uint8, in a writable mapping.

    Raises:
        ResourceExhaustedError: The system lacks pages; the committed ones are released.
    """
    if not memory.nbytes:
        return
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    problem = populate(begin, end - begin)
    if problem in (0, errno.EINVAL):
        return
    if problem not in (errno.EFAULT, errno.ENOMEM):
        raise OSError(problem, f"cannot commit memory: {os.strerror(problem)}")
    # Only whole pages of this range, because the pages at its ends may hold neighbours.
    inner = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    behind = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if behind > inner:
        _madvise(inner, behind - inner, _REMOVE)  # fails for private memory, which does not need it
    raise ResourceExhaustedError(
        f"the host, container or batch job has no {memory.nbytes} bytes of memory left"
    )


def populate(address: int, nbytes: int) -> int:
    """Commit all pages of a mapping, some of which may be committed already.

    Returns:
        0, or the error number: EFAULT if none are left, EINVAL before Linux 5.14.
    """
    return _madvise(address, nbytes, _POPULATE_WRITE)


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """Return 0, or the error number."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0
