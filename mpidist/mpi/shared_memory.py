"""The memory that the MPI libraries themselves need in /dev/shm, and their files there."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist.arena import populate
from mpidist.dev_shm import REMEDY, SHARED_MEMORY, shared_memory_space
from mpidist.errors import DistBackendError
from mpidist.mpi.launch_env import launcher_of

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

# MPICH writes to 1 MiB a rank and a little more while it starts, without asking for the pages.
_MPICH_BYTES = (1 << 20) + (1 << 16)
# MPICH's UCX takes 5 MiB a rank, and crashes if it gets a part of that (measured, UCX 1.18: at 16
# to 18 MiB with 2 ranks, and at 18 to 24 MiB with 4). It can be told to use no shared memory.
_UCX_BYTES = 16 << 20
_UCX_RANK_BYTES = 8 << 20


def usable_bytes(folder: str = SHARED_MEMORY) -> int:
    """Return the bytes that a job of MPICH can use, including the bytes that it uses already."""
    taken = 0
    for path in Path(folder).glob("mpich_shm_*"):
        with contextlib.suppress(FileNotFoundError):
            taken += path.stat().st_blocks * 512
    return shared_memory_space(folder)[0] + taken


def prepare(vendor: str, ranks: int, usable: int, env: MutableMapping[str, str]) -> None:
    """Set ``UCX_TLS`` if MPICH must start with little shared memory.

    Args:
        vendor: Vendor of the MPI library.
        ranks: Number of ranks of this node.
        usable: See :func:`usable_bytes`.
        env: The environment that the library reads.

    Raises:
        DistBackendError: There is so little memory that SIGBUS would end the process.
    """
    if vendor != "MPICH":
        return
    if usable < ranks * _MPICH_BYTES:
        raise DistBackendError(
            f"{SHARED_MEMORY} has {usable >> 10} KiB free, and MPICH needs "
            f"{ranks * _MPICH_BYTES >> 10} KiB for the {ranks} rank(s) of this node: {REMEDY}"
        )
    if usable < _UCX_BYTES + ranks * _UCX_RANK_BYTES:
        env.setdefault("UCX_TLS", "^posix")


def own_segments(maps: Iterable[str], rank: int) -> list[tuple[int, int]]:
    """Return the memory through which Open MPI sends messages to this rank within the node.

    Args:
        maps: The lines of ``/proc/self/maps``.
        rank: Rank of this process on its node.

    Returns:
        Address and length of each segment. Other MPI libraries have none.
    """
    found = []
    for line in maps:
        name = line[line.find("/") :].strip() if "/" in line else ""
        if name.startswith(f"{SHARED_MEMORY}/") and "/sm_segment." in name:
            begin, end = (int(text, 16) for text in line.split()[0].split("-"))
            if name.endswith(f".{rank}"):
                found.append((begin, end - begin))
    return found


def commit_segments(node: MPI.Comm) -> None:
    """Collective. Allocate the pages of the segments of Open MPI, or warn that memory is short.

    Open MPI allocates pages when messages are sent, and a rank that then finds none is killed. If
    there are too few pages for all ranks, none are allocated, and the ranks that need them first
    get them.

    Args:
        node: The ranks of this node.
    """
    with open("/proc/self/maps") as maps:
        segments = own_segments(maps, node.rank)
    needed = sum(node.allgather(sum(length for _, length in segments)))
    free, total = node.bcast(shared_memory_space())
    enough = free >= needed
    for segment in segments if enough else ():
        enough = enough and populate(*segment) != errno.EFAULT
    if not all(node.allgather(enough)) and node.rank == 0:
        logger.warning(
            "%s has %d MiB free of %d, and Open MPI may use %d for its messages: a rank that finds "
            "none left is killed by SIGBUS; %s",
            SHARED_MEMORY,
            free >> 20,
            total >> 20,
            needed >> 20,
            REMEDY,
        )


def unlink_mpi_files() -> None:
    """Remove the names of MPI's files in /dev/shm that this process has mapped.

    MPICH removes its file only in MPI_Finalize, so every killed or aborted job would leave one. A
    mapping outlives the name. Open MPI's segments are opened by peers at the first message, and its
    launcher removes them. A rank that is alone, without a launcher or under MPICH's, removes its
    own.
    """
    prefixes = [f"{SHARED_MEMORY}/mpich_shm_"]
    if launcher_of(os.environ) in (None, "hydra"):
        prefixes.append(f"{SHARED_MEMORY}/sm_segment.")
    with open("/proc/self/maps") as maps:
        names = {line.split()[-1] for line in maps}
    for name in sorted(names):
        if name.startswith(tuple(prefixes)):
            with contextlib.suppress(FileNotFoundError):  # another rank of the node was first
                os.unlink(name)
