"""Allocation of the memory of windows: shared memory of a node, MPI, or private memory."""

from __future__ import annotations

import mmap
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpidist.dev_shm import SHARED_MEMORY, shared_memory_space
from mpidist.errors import ResourceExhaustedError
from mpidist.host_memory import free_memory
from mpidist.mpi import watched

if TYPE_CHECKING:
    from mpi4py import MPI

Bytes = NDArray[np.uint8]

_MPI_BYTES = 1 << 16  # memory that MPI takes for itself, besides a page for each rank
# Without MAP_NORESERVE Linux refuses address space that is larger than its memory. Python names the
# flag from 3.13 on.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
# A lock word follows each rank's part. It guards additions of dtypes that MPI cannot accumulate.
_LOCK_BYTES = 64


class Allocation(NamedTuple):
    """The memory of a window.

    Attributes:
        sizes: Size of each rank's part in bytes.
        own: Number of this rank.
        parts: The parts that this process has mapped, by rank; flat uint8.
        win: The MPI window, locked for its whole life, or None for private memory.
    """

    sizes: list[int]
    own: int
    parts: dict[int, Bytes]
    win: MPI.Win | None


def shared(comm: MPI.Intracomm, nbytes: int) -> Allocation:
    """Collective over ranks of one node. Allocate shared memory; see :meth:`Window.shared`."""
    from mpi4py import MPI

    _check_size(nbytes)
    if comm.size == 1:  # MPICH's memory for a single rank is neither zero nor sparse
        return private(nbytes)
    with watched("Window.shared", comm.Get_group()):
        sizes = comm.allgather(nbytes)
        win = _allocate_shared(comm, [_with_lock(size) for size in sizes])
        win.Lock_all(MPI.MODE_NOCHECK)
    parts = {rank: _as_array(win.Shared_query(rank)[0], size) for rank, size in enumerate(sizes)}
    return Allocation(sizes, comm.rank, parts, win)


def rma(comm: MPI.Intracomm, nbytes: int) -> Allocation:
    """Collective. Allocate memory for one-sided operations; see :meth:`Window.rma`."""
    from mpi4py import MPI

    _check_size(nbytes)
    with watched("Window.rma", comm.Get_group()):
        sizes = _sizes_with_room(comm, nbytes)
        # The order of additions does not matter, so MPI need not keep it.
        info = MPI.Info.Create({"same_disp_unit": "true", "accumulate_ordering": "none"})
        try:
            win = MPI.Win.Allocate(_with_lock(nbytes), 1, info=info, comm=comm)
        except MPI.Exception as error:
            raise ResourceExhaustedError(f"no window of {nbytes} bytes: {error}") from error
        info.Free()
        memory = _as_array(win.tomemory(), _with_lock(nbytes))
        memory[:] = 0
        win.Lock_all(MPI.MODE_NOCHECK)
        win.Sync()
        comm.Barrier()  # all lock words are zero before any rank uses the window
    return Allocation(sizes, comm.rank, {comm.rank: memory[:nbytes]}, win)


def private(nbytes: int) -> Allocation:
    """Allocate private memory; see :meth:`Window.private`."""
    _check_size(nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, max(nbytes, 1), flags)
    return Allocation([nbytes], 0, {0: np.frombuffer(memory, np.uint8)[:nbytes]}, None)


def lock_offset(nbytes: int) -> int:
    """Return the offset of the lock word that follows a part of a size."""
    return _with_lock(nbytes) - _LOCK_BYTES


def _allocate_shared(comm: MPI.Intracomm, parts_bytes: list[int]) -> MPI.Win:
    """Allocate the MPI window, or raise the same error on all ranks."""
    from mpi4py import MPI

    needed = sum(parts_bytes) + _MPI_BYTES + comm.size * mmap.PAGESIZE
    free, total = comm.bcast(shared_memory_space())
    win, problem = None, None
    if free < needed:  # Open MPI would fail on one rank while the others wait for ever
        problem = f"{SHARED_MEMORY} has {free >> 10} KiB free of {total >> 10}"
    else:
        try:
            win = MPI.Win.Allocate_shared(parts_bytes[comm.rank], 1, comm=comm)
        except MPI.Exception as error:
            problem = str(error)
    problems = [text for text in comm.allgather(problem) if text is not None]
    if problems:  # windows that other ranks have got leak, because freeing takes all ranks
        raise ResourceExhaustedError(
            f"no {needed} bytes of shared memory for {comm.size} rank(s) of a node: {problems[0]}"
        )
    assert win is not None
    return win


def _sizes_with_room(comm: MPI.Intracomm, nbytes: int) -> list[int]:
    """Return the size of every rank's part, if each host has enough memory.

    Open MPI would fail on the rank without memory while the others wait for ever.
    """
    sizes = comm.allgather((nbytes, free_memory()))
    for rank, (wanted, (left, owner)) in enumerate(sizes):
        if wanted > left:
            raise ResourceExhaustedError(
                f"no window of {wanted} bytes for rank {rank}: its {owner} has {left >> 20} MiB "
                "of memory left"
            )
    return [wanted for wanted, _ in sizes]


def _check_size(nbytes: int) -> None:
    if index(nbytes) < 0:
        raise ValueError(f"a window cannot have {nbytes} bytes")


def _with_lock(nbytes: int) -> int:
    """Return the size of a part with its lock word. An empty part has no lock word."""
    return (-(-nbytes // _LOCK_BYTES) + 1) * _LOCK_BYTES if nbytes else 0


def _as_array(buffer: Any, nbytes: int) -> Bytes:
    return np.frombuffer(buffer, np.uint8)[:nbytes] if nbytes else np.empty(0, np.uint8)
