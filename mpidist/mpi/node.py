"""Memory, idle flags and wake-up sockets that the ranks of one node share beside MPI.

MPI has no way to sleep until a message arrives, and polling takes a core, or a part of one. An idle
rank sets its idle flag in the shared memory, polls once more, and sleeps at its datagram socket. A
sender looks at the flag after it has sent, and wakes the rank through the socket. So either the
idle rank sees the message or the sender sees the flag. (Without a memory fence between the two
steps both can miss; idle ranks poll every 20 to 40 ms by themselves.)
"""

from __future__ import annotations

import logging
import mmap
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mpidist.memfd import SharedMemfd, open_memfd
from mpidist.proto.mpidist_pb2 import Memory

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_CACHE_LINE_BYTES = 64  # flags share no cache line


class NodePeers:
    """The ranks of this node; made by :func:`share`.

    Args:
        size: Size of the world.
        names: Names of the ranks' sockets, by rank in the world. Empty if nothing is shared.
        socket: The socket of this rank.
        memory: A cache line for the flag of each rank, one for all other ranks, and a section for
            each rank.

    Attributes:
        names: See above.
        socket: See above.
        flags: The idle flags.
        flag_offsets: Offset of the flag of each rank of the world. Ranks of other nodes have one
            flag in common, which is never set.
        sections: Flat uint8 memory of each rank, by rank in the world, which the whole node maps.
    """

    def __init__(
        self,
        size: int,
        names: dict[int, bytes],
        socket: socket.socket,
        memory: NDArray[np.uint8],
    ) -> None:
        self.names, self.socket = names, socket
        self.flags = memory.data
        self.flag_offsets = [len(names) * _CACHE_LINE_BYTES] * size
        self.sections: dict[int, NDArray[np.uint8]] = {}
        start = _start_of_sections(len(names))
        for index, rank in enumerate(names):
            length = (memory.nbytes - start) // len(names)
            self.flag_offsets[rank] = index * _CACHE_LINE_BYTES
            self.sections[rank] = memory[start + index * length :][:length]


def share(comm: MPI.Comm, ranks: Sequence[int], size: int, nbytes: int) -> NodePeers:
    """Collective over ``comm``. Have the ranks of a node share memory and sockets.

    Args:
        comm: The ranks of this node.
        ranks: Their ranks in the world.
        size: Size of the world.
        nbytes: Size of each rank's section, at least a page.

    Returns:
        The ranks of the node. If the system does not let all of them share memory, none do, and
        the reason is logged.
    """
    waker, name, problem = _open_socket()
    names: list[bytes] = comm.allgather(name)
    shared = memory = None
    if comm.rank == 0 and not problem:
        length = max(nbytes // mmap.PAGESIZE, 1) * mmap.PAGESIZE
        try:
            shared = SharedMemfd(_start_of_sections(comm.size) + comm.size * length)
            memory = shared.memory
        except OSError as error:
            problem = str(error)
    reference = comm.bcast(shared.reference.SerializeToString() if shared else b"")
    if comm.rank and reference and not problem:
        try:
            memory = open_memfd(Memory.FromString(reference))
        except OSError as error:
            problem = str(error)
    problems = {text for text in comm.allgather(problem) if text}
    if shared is not None:
        shared.close()  # the others have opened it
    if problems or memory is None:
        logger.info("the ranks of this node share no memory beside MPI's: %s", problems)
        return NodePeers(size, {}, waker, np.zeros(_CACHE_LINE_BYTES, np.uint8))
    waker.setblocking(False)
    return NodePeers(size, dict(zip(ranks, names, strict=True)), waker, memory)


def _open_socket() -> tuple[socket.socket, bytes, str]:
    """Return the socket of this rank and its name, or a problem."""
    waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        waker.bind("")  # the system chooses a name outside the file system
    except OSError as error:
        return waker, b"", str(error)
    return waker, waker.getsockname(), ""


def _start_of_sections(ranks: int) -> int:
    return -(-(ranks + 1) * _CACHE_LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
