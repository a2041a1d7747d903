"""Memory that processes of one host share: a memfd that one creates and others open.

The creator tells the others its process id, the descriptor and a token. They open the memfd under
/proc (proc(5)), which Linux permits to processes of one user and process namespace. On another
host, or for another user, the path leads nowhere or to another file. So a process opens only a
memfd with the right name, and uses it only if its size is sealed and it begins with the token. A
wrong reference can neither make a process write to a foreign file nor cut its memory off.

A memfd has no name that could be left behind, a small /dev/shm does not limit it, and it takes
pages with the first write.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource

import numpy as np
from numpy.typing import NDArray

from mpidist.proto.mpidist_pb2 import Memory

_NAME = "mpidist-shared"
_TOKEN_BYTES = 16
# The size must not change, because reading beyond the end of a file ends a process.
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
_START = mmap.PAGESIZE  # the token has a page of its own


class SharedMemfd:
    """Memory of this process that others can open.

    Args:
        nbytes: Size. Only pages that are written to take memory.

    Attributes:
        memory: The memory, flat uint8, all zero.
        reference: The argument of :func:`open_memfd` in the other process.

    Raises:
        OSError: The system has no such memory, or this process has too many open files.
    """

    def __init__(self, nbytes: int) -> None:
        token = os.urandom(_TOKEN_BYTES)
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _check_descriptors(self._file)
            os.ftruncate(self._file, _START + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            whole = mmap.mmap(self._file, 0)
        except (OverflowError, ValueError) as error:  # of an absurd size
            self.close()
            raise OSError(f"no memory of {nbytes} bytes can be shared: {error}") from None
        except BaseException:
            self.close()
            raise
        whole[:_TOKEN_BYTES] = token
        self.memory: NDArray[np.uint8] = np.frombuffer(whole, np.uint8, offset=_START)
        self.reference = Memory(pid=os.getpid(), descriptor=self._file, token=token)

    def close(self) -> None:
        """Let no further process open the memory; idempotent. Existing mappings stay."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()


def open_memfd(reference: Memory) -> NDArray[np.uint8]:
    """Return the memory of another process, flat uint8.

    Raises:
        OSError: This process cannot have it, for example because it is another host's.
    """
    try:
        file = _open(f"/proc/{reference.pid}/fd/{reference.descriptor}")
        try:
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise OSError("the size of the shared memory can change")
            _check_descriptors(file)
            whole = mmap.mmap(file, 0)
        finally:
            os.close(file)
    except (OverflowError, ValueError) as error:
        raise OSError(str(error)) from None
    if len(whole) <= _START or whole[:_TOKEN_BYTES] != reference.token:
        raise OSError("the token of the shared memory is wrong")
    return np.frombuffer(whole, np.uint8, offset=_START)


def _open(path: str) -> int:
    """Open a memfd. No other file is opened, because opening alone can have effects."""
    link = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        own = f"/proc/self/fd/{link}"
        if not os.readlink(own).startswith(f"/memfd:{_NAME}"):
            raise OSError("the descriptor is no shared memory of mpidist")
        return os.open(own, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(link)


def _check_descriptors(newest: int) -> None:
    """Raise OSError if so many files are open that connections will need the rest."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and newest > limit // 2:
        raise OSError(f"more than half of {limit} descriptors are in use")
