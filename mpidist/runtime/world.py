"""The MPI world of this process, started when first asked for."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import mpi4py

from mpidist.config import config, distribution_version
from mpidist.errors import DistBackendError
from mpidist.home_folder import home_folder
from mpidist.runtime import fork, shared_memory, start
from mpidist.runtime.exits import install
from mpidist.runtime.launch import (
    foreign_launcher,
    foreign_step,
    launcher_of,
    local_size_hint,
    size_hint,
    start_settings,
    unspoken_launcher,
)
from mpidist.runtime.node import NodePeers, share

if TYPE_CHECKING:
    from mpi4py import MPI


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
        peers: The ranks of this node, and what they share beside MPI.
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
    peers: NodePeers
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
        DistBackendError: There is no MPI library, it does not give MPI_THREAD_MULTIPLE, or srun or
            another library's mpiexec started several ranks that it cannot see. The message has the
            remedy.
        FailedPreconditionError: The process was forked from one that had started MPI, or MPI has
            ended.
    """
    fork.check_mpi()
    with _starting:
        return _world()


# MPI may be started once, and lets other threads run meanwhile.
_starting = threading.RLock()


@cache
def _world() -> World:
    _refuse(foreign_step(os.environ))
    with start.watched():  # every rank must come here; this one waits until they do
        return _make_world()


def _make_world() -> World:
    owned = _start_mpi()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    facts = comm.allgather((socket.gethostname(), node.bcast(comm.rank), distribution_version()))
    _check_versions([version for _, _, version in facts])
    first_ranks = sorted({first for _, first, _ in facts})
    own = facts[comm.rank][1]
    on_node = [rank for rank, (_, first, _) in enumerate(facts) if first == own]
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
        peers=share(node, on_node, comm.size, node.bcast(config.shared_buffer_bytes)),
    )
    node.Barrier()
    start.unlink_shared_memory()  # all ranks of the node have mapped it
    shared_memory.commit_segments(node)
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
        local = local_size_hint(os.environ) or 1
        usable = shared_memory.usable_bytes()
        vendor = MPI.get_vendor()[0]
        _refuse(foreign_step(os.environ, vendor))
        _refuse(unspoken_launcher(os.environ, vendor, start.has_loaded("libpmix")))
        # Open MPI ends a process without HOME.
        os.environ.setdefault("HOME", home_folder())
        for name, value in start_settings(os.environ, MPI.Get_library_version()).items():
            os.environ.setdefault(name, value)
        shared_memory.prepare(vendor, local, usable, os.environ)
        _init_thread()
    level = MPI.Query_thread()
    if level != MPI.THREAD_MULTIPLE:
        raise DistBackendError(
            f"MPI gives thread level {level}, and mpidist needs MPI_THREAD_MULTIPLE "
            f"({MPI.THREAD_MULTIPLE}); use an MPI library built with it, and if the script imports "
            "mpi4py itself, leave mpi4py.rc.thread_level at 'multiple'"
        )
    if MPI.Comm.Get_parent() == MPI.COMM_NULL:
        problem = foreign_launcher(os.environ, MPI.get_vendor()[0], MPI.COMM_WORLD.size)
        if problem is not None:
            start.unlink_shared_memory()
            if owned:
                MPI.Finalize()
        _refuse(problem)
    return owned


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise DistBackendError(problem)


def _init_thread() -> None:
    """MPI.Init_thread, but other threads run meanwhile, such as the one that watches the start."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)
    code = library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise DistBackendError(f"MPI_Init_thread failed with error code {code}")
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as MPI.Init_thread does
        comm.Set_errhandler(MPI.ERRORS_RETURN)
