"""The MPI world of this process, started when first asked for."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import mpi4py

from mpidist.config import distribution_version
from mpidist.errors import DistBackendError
from mpidist.runtime import fork
from mpidist.runtime.exits import install
from mpidist.runtime.launch import foreign_step, launcher_of, size_hint

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_START_REMINDER_S = 15.0


@dataclass(frozen=True)
class World:
    """All ranks, and what is known of them.

    Attributes:
        rank: Of this process.
        size: Number of ranks.
        hosts: Host name of each rank.
        nodes: Node number of each rank: equal for ranks that can share memory.
        vendor: ``"MPICH"``, ``"Open MPI"``, ...
        version: The library's version.
        thread_level: Always ``"multiple"``; a world with less is refused.
        launcher: See :func:`launcher_of`.
        comm: Duplicate of MPI_COMM_WORLD; process groups are made from it.
        control: Carries leave notes between the watchdogs.
        messages: Carries endpoint messages.
        node: The ranks of this node.
        before_leave: Local clean-up, last registered first: threads that use MPI end here.
        at_leave: Collective clean-up, once every rank is at its end; same order on all ranks.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    vendor: str
    version: tuple[int, ...]
    thread_level: str
    launcher: str | None
    comm: MPI.Intracomm
    control: MPI.Intracomm
    messages: MPI.Intracomm
    node: MPI.Comm
    before_leave: list[Callable[[], None]] = field(default_factory=list)
    at_leave: list[Callable[[], None]] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self.hosts[self.rank]


def launched() -> bool:
    """Local. Whether this process is one of several ranks; does not start MPI."""
    if size_hint(os.environ) == 1:
        return False
    return launcher_of(os.environ) is not None


def world() -> World:
    """Collective. Start MPI if that has not been done, and describe the world.

    The first call on each rank is collective over all ranks; later ones are local.

    Returns:
        The world.

    Raises:
        DistBackendError: There is no MPI library, it does not give MPI_THREAD_MULTIPLE, or srun
            started several tasks that it cannot see. The message has the remedy.
        FailedPreconditionError: The process was forked from one that had started MPI.
    """
    fork.check()
    return _world()


@cache
def _world() -> World:
    problem = foreign_step(os.environ)
    if problem is not None:
        raise DistBackendError(problem)
    owned = _start_mpi()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    facts = comm.allgather((socket.gethostname(), node.bcast(comm.rank), distribution_version()))
    _check_versions([version for _, _, version in facts])
    first_ranks = sorted({first for _, first, _ in facts})
    vendor, version = MPI.get_vendor()
    result = World(
        rank=comm.rank,
        size=comm.size,
        hosts=tuple(host for host, _, _ in facts),
        nodes=tuple(first_ranks.index(first) for _, first, _ in facts),
        vendor=vendor,
        version=version,
        thread_level="multiple",
        launcher=launcher_of(os.environ),
        comm=comm,
        control=comm.Dup(),
        messages=comm.Dup(),
        node=node,
    )
    _unlink_shared_memory(node)
    install(result, finalize=owned)
    return result


def _check_versions(versions: list[str]) -> None:
    """What is said between ranks is only understood by the same version."""
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise DistBackendError(
                f"rank 0 has mpidist {versions[0]} and rank {rank} has {version}: install the same "
                "version for all ranks, on every host"
            )


def _start_mpi() -> bool:
    """Start MPI; True if that was left to us, False if the script had done it."""
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(
            f"mpi4py finds no MPI library ({error}); install one, for example with "
            'pip install "mpidist[mpich]", or load the cluster\'s MPI module'
        ) from error
    owned = not MPI.Is_initialized()
    if owned:
        # The call returns when every rank has made it.
        reminder = threading.Timer(_START_REMINDER_S, _remind)
        reminder.daemon = True
        reminder.start()
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        reminder.cancel()
    level = MPI.Query_thread()
    if level != MPI.THREAD_MULTIPLE:
        raise DistBackendError(
            f"MPI gives thread level {level}, and mpidist needs MPI_THREAD_MULTIPLE "
            f"({MPI.THREAD_MULTIPLE}); use an MPI library built with it, and if the script imports "
            "mpi4py itself, leave mpi4py.rc.thread_level at 'multiple'"
        )
    return owned


def _remind() -> None:
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "unknown")
    logger.warning(
        "rank %s has waited %.0f s for the other ranks to start MPI: every rank must, by making a "
        "process group, a resolver, a Server or an endpoint",
        rank,
        _START_REMINDER_S,
    )


def _unlink_shared_memory(node: MPI.Comm) -> None:
    """Remove the names of MPI's files in /dev/shm that all ranks of the node have mapped.

    MPICH removes its file only at MPI_Finalize, so that every killed or aborted job would leave
    one behind. Mappings live on without the name. Open MPI's segments are opened by peers at the
    first message, and its launcher removes them; a rank that is alone removes its own.
    """
    prefixes = ["/dev/shm/mpich_shm_"]
    if launcher_of(os.environ) is None:
        prefixes.append("/dev/shm/sm_segment.")
    with open("/proc/self/maps") as maps:
        names = {line.split()[-1] for line in maps}
    node.Barrier()
    for name in sorted(names):
        if name.startswith(tuple(prefixes)):
            try:
                os.unlink(name)
            except FileNotFoundError:
                continue  # a node-mate was first
