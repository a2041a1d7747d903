"""Memory that a process lends to another one of its host.

The lender makes a memfd, and tells the other its process id, the descriptor, and a token. The
borrower opens what lies there under /proc (proc(5)), which Linux grants to processes of one user
that see each other. Elsewhere it finds nothing, or something else; so it takes nothing but a memfd
of the right name that cannot shrink and that begins with the token: whoever makes it up can neither
have another's file written nor cut the memory off.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import resource

import numpy as np

from mpidist.arena import Bytes
from mpidist.proto.mpidist_pb2 import Memory

logger = logging.getLogger(__name__)

_NAME = "mpidist-shelf"
_TOKEN_BYTES = 16
# Its size stays what it is: to read beyond the end of a file ends a process.
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
_START = mmap.PAGESIZE  # the token has a page of its own


class Lent:
    """Memory of this process for one other.

    Args:
        nbytes: How much; only what is written to takes room.

    Attributes:
        memory: Flat uint8, all zero.
        offer: What the borrower must know.

    Raises:
        OSError: The system has no such memory, or this process too many open files.
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
        except BaseException:
            self.close()
            raise
        whole[:_TOKEN_BYTES] = token
        self.memory: Bytes = np.frombuffer(whole, np.uint8, offset=_START)
        self.offer = Memory(pid=os.getpid(), descriptor=self._file, token=token)

    def close(self) -> None:
        """Local. Let nobody borrow it any more; who has it keeps it. A second call does nothing."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()


def borrow(offer: Memory) -> Bytes | None:
    """Local. The memory that another process lends, flat uint8; None if it cannot be had."""
    try:
        file = _open(f"/proc/{offer.pid}/fd/{offer.descriptor}")
        try:
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                return None
            _check_descriptors(file)
            whole = mmap.mmap(file, 0)
        finally:
            os.close(file)
    except (OSError, OverflowError, ValueError) as error:  # as a rule it is another host's
        logger.debug("no memory is shared with process %d: %s", offer.pid, error)
        return None
    if len(whole) <= _START or whole[:_TOKEN_BYTES] != offer.token:
        return None
    return np.frombuffer(whole, np.uint8, offset=_START)


def _open(path: str) -> int:
    """Open a memfd; nothing else is opened, for that alone may do something."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        own = f"/proc/self/fd/{place}"
        if not os.readlink(own).startswith(f"/memfd:{_NAME}"):
            raise OSError("what lies there is no memory that was lent")
        return os.open(own, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(place)


def _check_descriptors(newest: int) -> None:
    """OSError if so many files are open that connections will need the rest."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and newest > limit // 2:
        raise OSError(f"more than half of {limit} descriptors are in use")
