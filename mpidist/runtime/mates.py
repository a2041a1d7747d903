"""What the ranks of one node share beside MPI: a stretch of memory each, and a bell each.

MPI has no way to sleep until a message comes, and to ask again and again takes a core, or a part of
one. A rank that has nothing to do says in the memory that it sleeps, looks once more, and sleeps at
its bell, a datagram socket; who sends it a message looks there afterwards, and rings. So either the
sleeper sees the message or the sender sees the sleeper.

The memory is a memfd: it has no name that could be left behind, no size that a small /dev/shm could
limit, and pages come with the first write.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arena import Bytes

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_LINE_BYTES = 64  # of the cache: flags share none
_TOKEN_BYTES = 16
_HANDOVER_S = 10.0
_MOST_RINGS = 64


class Mates:
    """The ranks of this node; made by :func:`share`.

    Args:
        own: Rank of this process in the world.
        size: Of the world.
        names: Of the ranks' bells, by rank in the world.
        bell: The own one.
        memory: A line of flags for each, a line for all others, and a section for each.

    Attributes:
        flags: Whether ranks sleep.
        places: Of the flags, by rank in the world.
        sections: By rank in the world, the memory that this rank has for the others; flat uint8.
    """

    def __init__(
        self,
        own: int,
        size: int,
        names: dict[int, bytes],
        bell: socket.socket,
        memory: mmap.mmap | bytes,
    ) -> None:
        start = _start_of_sections(len(names))
        self._names = names
        self._bell = bell
        self.flags = memoryview(memory)
        self.places = [len(names) * _LINE_BYTES] * size
        self.sections: dict[int, Bytes] = {}
        for index, rank in enumerate(names):
            length = (len(memory) - start) // len(names)
            self.places[rank] = index * _LINE_BYTES
            self.sections[rank] = np.frombuffer(memory, np.uint8, length, start + index * length)
        self._place = self.places[own]

    @property
    def descriptor(self) -> int:
        """Becomes readable when somebody rings."""
        return self._bell.fileno()

    def lie_down(self) -> None:
        """Local. Say that this rank sleeps from now on; it must look once more before it does."""
        self.flags[self._place] = 1

    def get_up(self) -> None:
        """Local. Say that it sleeps no more, and silence the bell."""
        self.flags[self._place] = 0
        with contextlib.suppress(BlockingIOError):  # it is silent
            for _ in range(_MOST_RINGS):  # whoever rings without end must not keep us here
                self._bell.recv(1)

    def ring(self, rank: int) -> None:
        """Local. Wake a rank whose flag says that it sleeps, after something was sent to it."""
        # It has ended, or others have rung so often that it is waking up; otherwise it looks by
        # itself before long.
        with contextlib.suppress(OSError):
            self._bell.sendto(b"", self._names[rank])


def share(comm: MPI.Comm, ranks: Sequence[int], size: int, nbytes: int) -> Mates:
    """Collective over ``comm``. Have the ranks of a node share memory and bells.

    Args:
        comm: The ranks of this node.
        ranks: These in the world.
        size: Of the world.
        nbytes: Memory for each, at least a page; only what is written to takes room.

    Returns:
        What they share; nothing, on all, where the system does not let them, which is logged.
    """
    bell, name, problem = _bell()
    names: list[bytes] = comm.allgather(name)
    memory = None
    token = b""
    if comm.rank == 0 and not problem:
        token = os.urandom(_TOKEN_BYTES)
        memory, problem = _lend(bell, names, nbytes, token)
    token = comm.bcast(token if memory else b"")
    if comm.rank and token and not problem:
        memory, problem = _borrow(bell, token)
    problems = {text for text in comm.allgather(problem) if text}
    if problems or memory is None:
        logger.info("the ranks of this node share no memory beside MPI's: %s", problems)
        return Mates(ranks[comm.rank], size, {}, bell, bytes(_LINE_BYTES))
    bell.setblocking(False)
    return Mates(ranks[comm.rank], size, dict(zip(ranks, names, strict=True)), bell, memory)


def _bell() -> tuple[socket.socket, bytes, str]:
    """A bell and its name, or a problem."""
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bell.bind("")  # the system chooses a name that is no file's
    except OSError as error:
        return bell, b"", str(error)
    return bell, bell.getsockname(), ""


def _lend(
    bell: socket.socket, names: Sequence[bytes], nbytes: int, token: bytes
) -> tuple[mmap.mmap | None, str]:
    """Make the memory, and send it to the others with the token: the memory, or a problem."""
    length = max(nbytes // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    try:
        file = os.memfd_create("mpidist")
        try:
            os.ftruncate(file, _start_of_sections(len(names)) + len(names) * length)
            memory = mmap.mmap(file, 0)
            # Not socket.send_fds(): that of CPython 3.11 ignores the address.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file))
            for name in names[1:]:
                bell.sendmsg([token], [rights], 0, name)
        finally:
            os.close(file)
    except (OSError, OverflowError, ValueError) as error:  # absurd sizes, too
        return None, str(error)
    return memory, ""


def _borrow(bell: socket.socket, token: bytes) -> tuple[mmap.mmap | None, str]:
    """Receive what was sent before: the memory, or a problem."""
    deadline = time.monotonic() + _HANDOVER_S
    try:
        while True:
            bell.settimeout(max(deadline - time.monotonic(), 1e-6))
            said, files, _, _ = socket.recv_fds(bell, _TOKEN_BYTES, 1)
            try:
                if said == token:  # others of this host can send to the bell, too
                    if not files:
                        return None, "too many files are open to receive another"
                    return mmap.mmap(files[0], 0), ""
            finally:
                for file in files:
                    os.close(file)
    except OSError as error:
        return None, str(error)


def _start_of_sections(ranks: int) -> int:
    return -(-(ranks + 1) * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
