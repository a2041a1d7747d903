"""The MPI world of this process. MPI starts when the world is first needed."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mpi4py

from mpidist.config import config, distribution_version
from mpidist.errors import DistBackendError
from mpidist.home_folder import home_folder
from mpidist.host_memory import keep_freed_memory
from mpidist.mpi import fork, metrics, records, shared_memory
from mpidist.mpi.launch_env import (
    child_of_rank,
    foreign_launcher,
    foreign_step,
    launcher_of,
    local_size_hint,
    size_hint,
    start_settings,
    unspoken_launcher,
)
from mpidist.mpi.node import NodePeers, share
from mpidist.mpi.shutdown import Shutdown
from mpidist.mpi.startup import has_loaded, watched_start
from mpidist.recorder import start_recorder

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class World:
    """All ranks and the facts about them.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        hosts: Host name of each rank.
        nodes: Node number of each rank, equal for ranks that can share memory.
        comm: Duplicate of MPI_COMM_WORLD, from which process groups are made.
        messages: Carries endpoint messages.
        node: The ranks of this node.
        peers: The ranks of this node, and the memory and sockets that they share beside MPI.
        hooks: Whether the hooks that can be turned off were wanted.
        started: Time at which this rank started MPI, in seconds since the epoch.
        shutdown: The hooks and the end of this rank.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    comm: MPI.Intracomm
    messages: MPI.Intracomm
    node: MPI.Comm
    peers: NodePeers
    hooks: bool
    started: float
    shutdown: Shutdown

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self.hosts[self.rank]

    def identify(self, job: str, task: int) -> None:
        """Set the task of this rank, for messages and records."""
        identity = self.shutdown.identity
        identity.job, identity.task = job, task
        records.write_rank(identity, self.started)


_world: World | None = None
# MPI may be started once, and other threads run meanwhile.
_starting = threading.RLock()


def launched() -> bool:
    """Return whether this process is one of several ranks. This does not start MPI."""
    if size_hint(os.environ) == 1:
        return False
    return launcher_of(os.environ) is not None


def world(hooks: bool | None = None) -> World:
    """Collective. Start MPI if it has not been started, and return the world.

    The first call of each rank is collective over all ranks. Later calls are not.

    Args:
        hooks: Whether to set the hooks of :mod:`mpidist.mpi.shutdown` that can be turned off.
            The default is the environment variable ``MPIDIST_HOOKS``.

    Raises:
        DistBackendError: There is no MPI library, the library does not give MPI_THREAD_MULTIPLE, or
            srun or another library's mpiexec started several ranks that this library cannot see.
            The message has the remedy.
        FailedPreconditionError: The process was forked from one that had started MPI, or MPI has
            ended.
        ValueError: MPI was started with the other value of ``hooks``.
    """
    global _world
    fork.check_mpi()
    with _starting:
        if _world is None:
            wanted = config.hooks if hooks is None else hooks
            with watched_start():  # this call returns after all ranks have made it
                _world = _make_world(wanted)
        elif hooks not in (None, _world.hooks):
            raise ValueError(
                f"hooks={hooks} comes too late: MPI was started with hooks={not hooks} in this "
                f"process; set MPIDIST_HOOKS={hooks:d}, or call init_process_group first"
            )
        return _world


def started_world() -> World | None:
    """Return the world, or None if mpidist has not started MPI in this process."""
    return _world


def this_rank() -> str:
    """Return this rank in words, with its host and, once known, its task; "" without MPI."""
    return "" if _world is None else str(_world.shutdown.identity)


def _make_world(hooks: bool) -> World:
    owned = _start_mpi()
    from mpi4py import MPI

    keep_freed_memory()
    comm = MPI.COMM_WORLD.Dup()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    facts = comm.allgather((socket.gethostname(), node.bcast(comm.rank), distribution_version()))
    _check_versions([version for _, _, version in facts])
    first_ranks = sorted({first for _, first, _ in facts})
    own_host, own_first, _ = facts[comm.rank]
    on_node = [rank for rank, (_, first, _) in enumerate(facts) if first == own_first]
    shutdown = Shutdown(
        records.Identity(comm.rank, os.getpid(), own_host),
        comm.Dup(),
        finalize=owned,
        # Without a launcher no rank waits for this one, and a prompt must survive an error.
        hooks=hooks and (launcher_of(os.environ) is not None or comm.size > 1),
    )
    result = World(
        rank=comm.rank,
        size=comm.size,
        hosts=tuple(host for host, _, _ in facts),
        nodes=tuple(first_ranks.index(first) for _, first, _ in facts),
        comm=comm,
        messages=comm.Dup(),
        node=node,
        peers=share(node, on_node, comm.size, node.bcast(config.shared_buffer_bytes)),
        hooks=hooks,
        started=time.time(),
        shutdown=shutdown,
    )
    node.Barrier()
    shared_memory.unlink_mpi_files()  # all ranks of the node have mapped them
    shared_memory.commit_segments(node)
    records.write_rank(shutdown.identity, result.started)
    metrics.start_timeline(comm.rank)
    start_recorder(comm.rank)
    fork.in_parent_only(_forget)
    shutdown.install()
    return result


def _forget() -> None:
    """Forget the world in a forked child."""
    global _world
    if _world is not None:
        _world.shutdown.uninstall()
        _world = None


def _check_versions(versions: list[str]) -> None:
    """Refuse ranks of different versions, because messages between ranks may differ."""
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise DistBackendError(
                f"rank 0 has mpidist {versions[0]} and rank {rank} has {version}: install the same "
                "version for all ranks, on every host"
            )


def _start_mpi() -> bool:
    """Start MPI. Return False if the script has started it."""
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(
            f"mpi4py finds no MPI library ({error}); install one, for example with "
            'pip install "mpidist[mpich]", or load the cluster\'s MPI module'
        ) from error
    vendor = MPI.get_vendor()[0]
    _refuse(foreign_step(os.environ, vendor))
    owned = not MPI.Is_initialized()
    if owned:
        _refuse(child_of_rank(os.environ))
        local = local_size_hint(os.environ) or 1
        usable = shared_memory.usable_bytes()
        _refuse(unspoken_launcher(os.environ, vendor, has_loaded("libpmix")))
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
        problem = foreign_launcher(os.environ, vendor, MPI.COMM_WORLD.size)
        if problem is not None:
            shared_memory.unlink_mpi_files()
            if owned:
                MPI.Finalize()
        _refuse(problem)
    return owned


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise DistBackendError(problem)


def _init_thread() -> None:
    """Call MPI_Init_thread without the interpreter's lock, which mpi4py holds meanwhile.

    Other threads must run, such as the watchdog of the start.
    """
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)
    code = library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise DistBackendError(f"MPI_Init_thread failed with error code {code}")
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as MPI.Init_thread does
        comm.Set_errhandler(MPI.ERRORS_RETURN)
