"""The default group, and functions that return facts about a group."""

from __future__ import annotations

import os
import warnings
from typing import Any, Literal

import mpidist.group as group_package
from mpidist.collectives.backends import WITH_GPUS, Backend, BackendName, check_options
from mpidist.gpu import cupy, device_count, why_no_gpu
from mpidist.group import ProcessGroup
from mpidist.mpi import watched, world
from mpidist.work import Timeout

_default: ProcessGroup | None = None
_made: list[ProcessGroup] = []  # groups made from the default group; destroyed with it
_backend = Backend(Backend.MPI)  # of the default group and of those made from it
_ELASTIC_RUN = "TORCHELASTIC_RUN_ID"


class NonGroupMember:
    """The type of ``GroupMember.NON_GROUP_MEMBER``, a group argument of ranks outside a group."""

    def __repr__(self) -> str:
        return "<GroupMember.NON_GROUP_MEMBER>"


class _Members(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None if it does not exist."""
        return _default


class GroupMember(metaclass=_Members):
    """The default group, and the marker for ranks outside a group, as in torch.

    Attributes:
        WORLD: The default group, or None if it does not exist.
        NON_GROUP_MEMBER: Result of :func:`new_group` on ranks outside the new group.
    """

    NON_GROUP_MEMBER = NonGroupMember()


Group = ProcessGroup | NonGroupMember | None
"""The type of ``group`` arguments. None means the default group."""


def init_process_group(
    backend: BackendName | Backend | None = None,
    init_method: Literal["env://"] | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "world",
    pg_options: Any = None,
    device_id: Any = None,
    *,
    hooks: bool | None = None,
) -> ProcessGroup:
    """Collective. Make the default group, of all ranks that the launcher has started.

    Args:
        backend: ``"mpi"`` or ``"cpu:mpi"`` moves all arrays through host memory.
            ``"cpu:mpi,cuda:nccl"`` gives this rank a GPU, and the group runs collectives of arrays
            on GPUs through NCCL or CUDA IPC, as its ``gpu_rule`` says. The default is
            ``"cpu:mpi,cuda:nccl"`` if a rank has CuPy and a GPU, else ``"mpi"``.
        init_method: None or ``"env://"``. MPI needs no rendezvous.
        timeout: Time limit of every operation, in seconds or as a timedelta. The default is no
            limit, unlike in torch.
        world_size: Number of ranks. A wrong number is an error. The default is to ask the launcher.
        rank: Rank of this process. A wrong number is an error. The default is to ask the launcher.
        store: Argument of torch; must be None.
        group_name: Name of the group in messages, ``"world"`` by default.
        pg_options: Argument of torch; must be None.
        device_id: GPU of this rank: an index or a ``torch.device``. The default is CuPy's current
            device. NCCL needs a different one on each rank of a host.
        hooks: False leaves ``sys.excepthook``, ``threading.excepthook``, ``sys.stdout`` and signals
            alone, for programs that embed mpidist. docs/hooks.md says what the job loses. The
            default is the environment variable ``MPIDIST_HOOKS``, or True if it is not set.

    Returns:
        The default group. torch's function returns None.

    Raises:
        DistBackendError: MPI cannot be started.
        ValueError: The default group exists, an argument has no meaning for MPI or contradicts the
            launcher, torchrun has started several processes, the ranks give different backends, or
            MPI was started before with the other value of ``hooks``.

    Example:
        >>> import mpidist as dist
        >>> group = dist.init_process_group()  # in a script under mpidist run: all ranks of the job
        >>> dist.get_rank(), dist.get_world_size()
        (0, 1)
    """
    if _default is not None:
        raise ValueError("the default group exists already; destroy_process_group() ends it")
    check_options(backend, store=store, pg_options=pg_options)
    if init_method not in (None, "env://"):
        raise ValueError(
            f"init_method {init_method!r} has no meaning here: MPI needs no rendezvous"
        )
    here = world(hooks)
    for name, value, truth in (("world_size", world_size, here.size), ("rank", rank, here.rank)):
        if value not in (-1, truth):
            raise ValueError(
                f"{name}={value}, but the launcher says {truth}; leave it out, or start the script "
                "with the number of ranks you mean"
            )
    started = os.environ.get("WORLD_SIZE", "1")
    if here.size == 1 and "TORCHELASTIC_RUN_ID" in os.environ and started != "1":
        raise ValueError(
            f"torchrun has started {started} processes, and each is an MPI job of one rank: start "
            f"the script with mpidist run -n {started}"
        )
    wish = _wish(backend)
    device = _device_of(wish, device_id)
    with watched("init_process_group", here.comm.Get_group()):
        comm = here.comm.Dup()
        wishes = comm.allgather(wish)
    if len(set(wishes) - {None}) > 1:
        raise ValueError(f"the ranks want different backends: {wishes}")
    made = ProcessGroup(comm, group_name, timeout, device)
    _become_default(made, Backend(WITH_GPUS if WITH_GPUS in wishes else Backend.MPI))
    return made


def _become_default(group: ProcessGroup | None, backend: Backend) -> None:
    global _default, _backend
    _default = group_package.WORLD = group
    _backend = backend


def _wish(backend: str | None) -> str | None:
    """Return the backend of this rank's choice; None if it has no GPU and no choice was made."""
    if backend is None:
        return None if why_no_gpu(os.environ) else WITH_GPUS
    return WITH_GPUS if backend.lower() == WITH_GPUS else "mpi"


def _device_of(backend: str | None, device_id: Any) -> int | None:
    """Return the index of this rank's GPU; None if the rank uses none.

    Args:
        backend: The backend of this rank's choice.
        device_id: An index, a ``torch.device``, or None for CuPy's current device.

    Raises:
        ValueError: There is no such GPU, or the backend has none.
    """
    problem = why_no_gpu(os.environ)
    if problem or backend != WITH_GPUS:
        if device_id is not None:
            reason = problem or f"backend {backend!r} uses no GPUs"
            raise ValueError(f"device_id {device_id!r} cannot be used: {reason}")
        return None
    number = device_id if isinstance(device_id, int) else getattr(device_id, "index", None)
    if device_id is None or number is None:  # torch.device("cuda") has no index
        return int(cupy().cuda.runtime.getDevice())
    count = device_count()
    if not isinstance(number, int) or not 0 <= number < count:
        raise ValueError(f"device_id {device_id!r} is not one of the {count} GPU(s), from 0")
    return number


def destroy_process_group(group: Group = None) -> None:
    """Collective. Destroy a group. With the default group, destroy all groups made from it.

    A rank outside the group does nothing but warn.

    Args:
        group: Process group, by default the default group.

    Raises:
        ValueError: There is no default group, the group was destroyed before, or its members have
            called different collectives since the last comparison.
    """
    ending = group_if_member(group)
    if ending is None:
        return
    if ending is _default:
        for made in reversed(_made):
            if not made.freed:  # by its own method
                made.free()
        _made.clear()
        _become_default(None, Backend(Backend.MPI))
        if ending.freed:
            return
    ending.free()


def is_available() -> bool:
    """Return True: without its requirements the package cannot be imported."""
    return True


def is_initialized() -> bool:
    """Return whether the default group exists."""
    return _default is not None


def is_torchelastic_launched() -> bool:
    """Return whether torchrun (torch.distributed.elastic) has started this process.

    As in torch, the environment variable ``TORCHELASTIC_RUN_ID`` decides. See
    :func:`mpidist.launched` for the launchers of MPI.
    """
    return _ELASTIC_RUN in os.environ


def get_rank(group: Group = None) -> int:
    """Return the rank of this process in a group.

    Args:
        group: Process group, by default the default group.

    Returns:
        The group rank. A rank outside the group gets -1.

    Raises:
        ValueError: There is no default group.
    """
    return -1 if isinstance(group, NonGroupMember) else group_or_default(group).rank()


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks of a group.

    Args:
        group: Process group, by default the default group.

    Returns:
        The number of ranks. A rank outside the group gets -1.

    Raises:
        ValueError: There is no default group.
    """
    return -1 if isinstance(group, NonGroupMember) else group_or_default(group).size()


def get_backend(group: Group = None) -> Backend:
    """Return the name of a group's backend.

    Args:
        group: Process group, by default the default group.

    Returns:
        The backend of the default group, for that and for groups made from it. It is ``"mpi"`` or
        ``"cpu:mpi,cuda:nccl"``. Other groups have ``"mpi"``. The attribute ``gpu_rule`` of a group
        tells how it uses GPUs.

    Raises:
        ValueError: There is no default group, or this rank is outside the group.
    """
    found = group_or_default(group)
    return _backend if found is _default or found in _made else Backend(Backend.MPI)


def get_backend_config(group: Group = None) -> str:
    """Return the backend of a group for each type of device.

    Args:
        group: Process group, by default the default group.

    Returns:
        ``"cpu:mpi,cuda:nccl"`` for a group that may use NCCL, else
        ``"cpu:mpi,cuda:mpi"``: arrays on GPUs go through host memory.

    Raises:
        ValueError: There is no default group, or this rank is outside the group.
    """
    backend = get_backend(group)
    return str(backend) if ":" in backend else f"cpu:{backend},cuda:{backend}"


def get_pg_count() -> int:
    """Return the number of process groups of this rank: the default group and those made from it.

    torch counts all groups that were ever made. This function counts the groups that exist.
    """
    return len(existing_groups())


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return the group rank of a world rank.

    Args:
        group: Process group. None means the default group.
        global_rank: World rank.

    Raises:
        ValueError: There is no default group, this rank is outside the group, or the given rank is.
    """
    return group_or_default(group).position(global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the world rank of a group rank.

    Args:
        group: Process group. None means the default group.
        group_rank: Group rank.

    Raises:
        ValueError: There is no default group, this rank is outside the group, or the group has no
            such rank.
    """
    ranks = group_or_default(group).ranks
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"group rank {group_rank} is not in a group of {len(ranks)}")
    return ranks[group_rank]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the world ranks of a group, in the order of the group ranks.

    Args:
        group: Process group, by default the default group.

    Raises:
        ValueError: There is no default group, or this rank is outside the group.
    """
    return list(group_or_default(group).ranks)


def set_timeout(timeout: Timeout, group: Group = None) -> None:
    """Set the time limit of all later operations of a group on this rank.

    A rank outside the group does nothing but warn.

    Args:
        timeout: Time limit, in seconds or as a timedelta. None means no limit.
        group: Process group, by default the default group.

    Raises:
        TypeError: The limit is no number and no timedelta.
        ValueError: There is no default group, or the limit is negative or NaN.
    """
    pg = group_if_member(group)
    if pg is not None:
        pg.set_timeout(timeout)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the rank of this process among the ranks of its node.

    The environment variable ``LOCAL_RANK`` decides. Without it, MPI is started and knows the ranks
    of the node.

    Args:
        fallback_rank: Argument of torch without effect.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return world().node.rank


def group_or_default(group: Group) -> ProcessGroup:
    """Return a group, by default the default group.

    Raises:
        ValueError: There is no default group, or this rank is outside the group.
    """
    if group is None:
        if _default is None:
            raise ValueError("there is no default group: call init_process_group() first")
        return _default
    if isinstance(group, NonGroupMember):
        raise ValueError("this rank is not a member of the group")  # noqa: TRY004 (torch's choice)
    return group


def group_if_member(group: Group) -> ProcessGroup | None:
    """Return a group, by default the default group. On a rank outside it, warn and return None."""
    if group is None and _default is not None:
        return _default
    if group.__class__ is NonGroupMember:
        warnings.warn("this rank is not a member of the group: nothing is done", stacklevel=3)
        return None
    return group_or_default(group)


def destroy_with_default(group: ProcessGroup) -> None:
    """Register a group, so that the end of the default group destroys it."""
    _made[:] = [made for made in _made if not made.freed]
    _made.append(group)


def existing_groups() -> list[ProcessGroup]:
    """Return the default group and the groups made from it, without destroyed ones."""
    groups = _made if _default is None else [_default, *_made]
    return [group for group in groups if not group.freed]
