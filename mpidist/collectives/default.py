"""The default group, and what is asked of groups."""

from __future__ import annotations

import os
import warnings
from typing import Any

import mpidist.group as group_package
from mpidist.config import config
from mpidist.cuda import why_no_gpu
from mpidist.group import DirectGroup, ProcessGroup
from mpidist.runtime import together, world
from mpidist.work import Timeout

BACKENDS = ("mpi", "cpu:mpi", "cpu:mpi,cuda:nccl")
_DIRECT = BACKENDS[-1]
_OTHER_BACKENDS = ("gloo", "nccl", "ucc", "xccl", "hccl", "fake")

_default: ProcessGroup | None = None
_made: list[ProcessGroup] = []  # from the default group; they end with it


class NonGroupMember:
    """What new_group gives to ranks that are not members."""

    def __repr__(self) -> str:
        return "<GroupMember.NON_GROUP_MEMBER>"


class _Members(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, None before there is one."""
        return _default


class GroupMember(metaclass=_Members):
    """torch's names: ``GroupMember.WORLD`` and ``GroupMember.NON_GROUP_MEMBER``."""

    NON_GROUP_MEMBER = NonGroupMember()


Group = ProcessGroup | NonGroupMember | None
"""What a ``group`` argument takes; None means the default group."""


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
        backend: With ``"cpu:mpi,cuda:nccl"`` it is a :class:`mpidist.DirectGroup`, whose large
            operations on GPUs go from GPU to GPU; so it is with None where a rank has CuPy and a
            GPU. With ``"mpi"`` or ``"cpu:mpi"`` all goes through the memory of the host.
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
    if _default is not None:
        raise ValueError("the default group exists already; destroy_process_group() ends it")
    check_backend(backend)
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
    with together("init_process_group", here.comm.Get_group()):
        comm = here.comm.Dup()
        wishes = comm.allgather(_wish(backend))
    if len(set(wishes) - {None}) > 1:
        raise ValueError(
            f"the ranks want different backends, or say MPIDIST_GPU_WAY differently: {wishes}"
        )
    kind = DirectGroup if _DIRECT in wishes else ProcessGroup
    made = kind(comm, group_name, timeout)
    _become_default(made)
    return made


def check_backend(backend: str | None) -> None:
    """Raise ValueError, which says what to do, for a backend that this package does not have."""
    if backend is None or (isinstance(backend, str) and backend.lower() in BACKENDS):
        return
    known = ", ".join(BACKENDS)
    if any(name in str(backend).lower() for name in _OTHER_BACKENDS):
        raise ValueError(
            f"backend {backend!r} is not one of this package, which runs on MPI: leave it out (the "
            f"known ones are {known})"
        )
    raise ValueError(f"unknown backend {backend!r}: leave it out; the known ones are {known}")


def _become_default(group: ProcessGroup | None) -> None:
    global _default
    _default = group_package.WORLD = group


def _wish(backend: str | None) -> str | None:
    """The backend that this rank wants; None if it has no GPU, and does not say."""
    if config.gpu_way == "staged":
        return "mpi"
    if backend is None:
        return _DIRECT if config.gpu_way != "auto" or not why_no_gpu(os.environ) else None
    return _DIRECT if backend.lower() == _DIRECT else "mpi"


def destroy_process_group(group: Group = None) -> None:
    """Collective. End a group; with the default group all that were made from it.

    Args:
        group: By default the default group. Nothing happens on ranks that are not members.

    Raises:
        ValueError: There is no default group, or the group was destroyed before.
    """
    ending = acting(group)
    if ending is None:
        return
    if ending is _default:
        for made in reversed(_made):
            if not made.freed:  # by its own method
                made.free()
        _made.clear()
        _become_default(None)
        if ending.freed:
            return
    ending.free()


def is_available() -> bool:
    """Local. True: the package cannot be imported without what it needs."""
    return True


def is_initialized() -> bool:
    """Local. Whether the default group exists."""
    return _default is not None


def get_rank(group: Group = None) -> int:
    """Local. Rank of this process in a group; -1 if it is not a member."""
    return -1 if isinstance(group, NonGroupMember) else given(group).rank()


def get_world_size(group: Group = None) -> int:
    """Local. Number of ranks of a group; -1 if this process is not a member."""
    return -1 if isinstance(group, NonGroupMember) else given(group).size()


def get_backend(group: Group = None) -> str:
    """Local. Always ``"mpi"``; ValueError if this process is not a member."""
    given(group)
    return "mpi"


def get_group_rank(group: Group, global_rank: int) -> int:
    """Local. Group rank of a rank of the world; ValueError if it is not a member."""
    return given(group).position(global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Local. Rank in the world of a group rank; ValueError if there is none."""
    ranks = given(group).ranks
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"group rank {group_rank} is not in a group of {len(ranks)}")
    return ranks[group_rank]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Local. Ranks in the world of all members, by group rank."""
    return list(given(group).ranks)


def set_timeout(timeout: Timeout, group: Group = None) -> None:
    """Local. Time limit of every later operation of a group.

    Args:
        timeout: Seconds or a timedelta; None for none.
        group: The group; without it the default group.

    Raises:
        ValueError: The limit is negative, or no number.
    """
    acts = acting(group)
    if acts is not None:
        acts.set_timeout(timeout)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Local. Rank of this process among those of its node.

    Args:
        fallback_rank: Not needed: MPI knows; torch's argument.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return world().node.rank


def given(group: Group) -> ProcessGroup:
    """Local. The group meant by an argument.

    Raises:
        ValueError: There is no default group, or this rank is not a member.
    """
    if group is None:
        if _default is None:
            raise ValueError("there is no default group: call init_process_group() first")
        return _default
    if isinstance(group, NonGroupMember):
        raise ValueError("this rank is not a member of the group")  # noqa: TRY004 (torch's choice)
    return group


def acting(group: Group) -> ProcessGroup | None:
    """Local. The group that acts; None, with a warning, if this rank is not a member."""
    if group is None and _default is not None:
        return _default
    if group.__class__ is NonGroupMember:
        warnings.warn("this rank is not a member of the group: nothing is done", stacklevel=3)
        return None
    return given(group)


def keep(group: ProcessGroup) -> None:
    """Local. Have a group end together with the default group."""
    _made[:] = [made for made in _made if not made.freed]
    _made.append(group)
