"""The default group, and the functions of torch.distributed that act on it or on a given group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mpidist.arrays import ReduceOp
from mpidist.group import ProcessGroup
from mpidist.runtime import world
from mpidist.work import Timeout, Work

BACKENDS = ("mpi", "cpu:mpi", "cpu:mpi,cuda:nccl")

_default: ProcessGroup | None = None


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "world",
    pg_options: Any = None,
    device_id: Any = None,
) -> ProcessGroup:
    """Collective. Make the default group, of the whole world; the launcher has said who is who.

    Args:
        backend: None, ``"mpi"``, or ``"cpu:mpi,cuda:nccl"``.
        init_method: None or ``"env://"``; MPI needs no rendezvous.
        timeout: Time limit of every operation, in seconds or as a timedelta. Unlike torch's, the
            default is none.
        world_size: The number of ranks, checked if given.
        rank: The rank of this process, checked if given.
        store: Not needed; must be None.
        group_name: For messages.
        pg_options: Not needed; must be None.
        device_id: Not needed; must be None.

    Returns:
        The default group.

    Raises:
        DistBackendError: MPI cannot be started as needed.
        ValueError: The group exists, or an argument contradicts what the launcher says.
    """
    global _default
    if _default is not None:
        raise ValueError("the default group exists already; destroy_process_group() ends it")
    if backend is not None and backend.lower() not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; the known ones are {', '.join(BACKENDS)}")
    if init_method not in (None, "env://"):
        raise ValueError(
            f"init_method {init_method!r} has no meaning here: MPI needs no rendezvous"
        )
    for name, value in (("store", store), ("pg_options", pg_options), ("device_id", device_id)):
        if value is not None:
            raise ValueError(f"{name} has no meaning here: leave it None")
    here = world()
    for name, value, truth in (("world_size", world_size, here.size), ("rank", rank, here.rank)):
        if value not in (-1, truth):
            raise ValueError(
                f"{name}={value}, but the launcher says {truth}; leave it out, or start the script "
                "with the number of ranks you mean"
            )
    _default = ProcessGroup(here.comm.Dup(), group_name, timeout)
    return _default


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Collective. End a group, by default the default group."""
    global _default
    ending = _group(group)
    if ending is _default:
        _default = None
    ending.free()


def is_available() -> bool:
    """Local. True: the package cannot be imported without what it needs."""
    return True


def is_initialized() -> bool:
    """Local. Whether the default group exists."""
    return _default is not None


def get_rank(group: ProcessGroup | None = None) -> int:
    """Local. Rank of this process in a group."""
    return _group(group).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Local. Number of ranks of a group."""
    return _group(group).size()


def get_backend(group: ProcessGroup | None = None) -> str:
    """Local. Always ``"mpi"``."""
    _group(group)
    return "mpi"


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Local. Rank of this process among those of its node.

    Args:
        fallback_rank: Not needed: MPI knows; torch's argument.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return world().node.rank


def all_reduce(
    array: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_reduce`."""
    return (group or _group(None)).all_reduce(array, op, async_op)


def reduce(
    array: Any,
    dst: int | None = None,
    op: ReduceOp | str = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.reduce`."""
    return _group(group).reduce(array, dst, op, async_op, group_dst)


def broadcast(
    array: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.broadcast`."""
    return _group(group).broadcast(array, src, async_op, group_src)


def all_gather(
    array_list: Sequence[Any],
    array: Any,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_gather`."""
    return _group(group).all_gather(array_list, array, async_op)


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: Timeout = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.barrier`; ``device_ids`` is torch's, and has no use."""
    return _group(group).barrier(async_op, timeout)


def send(
    array: Any,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Point to point. See :meth:`ProcessGroup.send`."""
    _group(group).send(array, dst, tag, group_dst)


def recv(
    array: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Point to point. See :meth:`ProcessGroup.recv`."""
    return _group(group).recv(array, src, tag, group_src)


def isend(
    array: Any,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Point to point. See :meth:`ProcessGroup.isend`."""
    return _group(group).isend(array, dst, tag, group_dst)


def irecv(
    array: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Point to point. See :meth:`ProcessGroup.irecv`."""
    return _group(group).irecv(array, src, tag, group_src)


def _group(group: ProcessGroup | None) -> ProcessGroup:
    if group is not None:
        return group
    if _default is None:
        raise ValueError("there is no default group: call init_process_group() first")
    return _default
