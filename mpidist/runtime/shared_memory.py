"""What the MPI libraries themselves need of /dev/shm, and what happens where there is less."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist.arena import populate
from mpidist.dev_shm import REMEDY, SHARED_MEMORY, shared_memory_space
from mpidist.errors import DistBackendError

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

# MPICH writes to 1 MiB a rank and a little more while it starts, without asking for the pages.
_MPICH_BYTES = (1 << 20) + (1 << 16)
# The UCX in it takes 5 MiB a rank, and crashes where it gets a part of that (measured, 1.18, at
# 16 to 18 MiB with 2 ranks and at 18 to 24 MiB with 4); told to do without, it does.
_UCX_BYTES = 16 << 20
_UCX_RANK_BYTES = 8 << 20


def usable_bytes(folder: str = SHARED_MEMORY) -> int:
    """Local. Bytes free for a job of MPICH that is about to start, and those it has taken."""
    taken = 0
    for path in Path(folder).glob("mpich_shm_*"):
        with contextlib.suppress(FileNotFoundError):
            taken += path.stat().st_blocks * 512
    return shared_memory_space(folder)[0] + taken


def prepare(vendor: str, ranks: int, usable: int, env: MutableMapping[str, str]) -> None:
    """Local. Have MPI start with the shared memory that there is, or say that it cannot.

    Args:
        vendor: Of the MPI library.
        ranks: How many of this node.
        usable: See :func:`usable_bytes`.
        env: The environment that the library reads.

    Raises:
        DistBackendError: It would be killed by SIGBUS while it starts.
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
    """Local. Where Open MPI has mapped what this rank's messages to node-mates go through.

    Args:
        maps: The lines of ``/proc/self/maps``.
        rank: Of this process among those of its node.

    Returns:
        Address and length of each; none with another library, or where it uses none.
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
    """Collective over ``node``. Have the pages that Open MPI writes to without asking.

    It would take them when messages are sent, and a rank that then finds none is killed. Where
    there are not enough for all, that is told, and they are left to who needs them first.

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
