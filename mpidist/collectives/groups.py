"""Functions of torch.distributed that make groups from other groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from mpidist.collectives.backends import Backend, BackendName, check_options
from mpidist.collectives.default import (
    Group,
    GroupMember,
    NonGroupMember,
    destroy_with_default,
    group_or_default,
)
from mpidist.group import CartesianGroup, ProcessGroup, make_group
from mpidist.mpi import watched, world
from mpidist.work import Timeout

_numbers = itertools.count(1)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    backend: BackendName | Backend | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonGroupMember:
    """Collective over the new ranks. Make a group of some ranks of the world.

    The ranks outside the new group need not call this function. If they do, it returns at once.

    Args:
        ranks: World ranks of the group. The default is all ranks.
        timeout: Time limit of every operation, in seconds or as a timedelta. The default is no
            limit.
        backend: None or a backend of :func:`init_process_group`. The new group has the backend of
            the default group in any case.
        pg_options: Argument of torch; must be None.
        use_local_synchronization: Argument of torch without effect: only the ranks of the new
            group take part.
        group_desc: Name of the group in messages. The default is a number.
        device_id: Argument of torch; must be None.
        sort_ranks: Number the group ranks in the order of the world ranks, the default. False
            keeps the order of ``ranks``.

    Returns:
        The group. A rank outside the group gets ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        ValueError: A rank is given twice or is not in the world, or an argument has no meaning for
            MPI.

    Example:
        >>> import mpidist as dist
        >>> world = dist.init_process_group()
        >>> even = dist.new_group(range(0, world.size(), 2), timeout=30)
        >>> if dist.get_rank() % 2 == 0:
        ...     even.barrier()
    """
    check_options(backend, pg_options=pg_options, device_id=device_id)
    parent = group_or_default(None)
    members = list(parent.ranks if ranks is None else ranks)
    group = make_group(
        parent, sorted(members) if sort_ranks else members, _name(group_desc), timeout
    )
    return _kept(group)


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout = None,
    backend: BackendName | Backend | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonGroupMember, list[ProcessGroup | NonGroupMember]]:
    """Collective. Divide a group into groups of neighbouring ranks, all of one size.

    Args:
        group_size: Number of ranks of each new group. The default is the number of ranks of this
            node.
        group: Process group to divide, by default the default group.
        timeout: Time limit of every operation, in seconds or as a timedelta. The default is no
            limit.
        backend: As in :func:`new_group`.
        pg_options: Argument of torch; must be None.
        group_desc: Name of the groups in messages. The default is a number.

    Returns:
        The new group of this rank, and a list with one entry per new group. An entry is the group,
        or ``GroupMember.NON_GROUP_MEMBER`` if this rank is outside.

    Raises:
        ValueError: The size does not divide the number of ranks, or an argument has no meaning for
            MPI.
    """
    parent = group_or_default(group)
    size = world().node.size if group_size is None else group_size
    if size < 1 or parent.size() % size:
        raise ValueError(
            f"a group of {parent.size()} cannot be cut into groups of {size}; give a group_size "
            "that divides it"
        )
    lists = [list(parent.ranks[start : start + size]) for start in range(0, parent.size(), size)]
    mine, groups = _enumerated(parent, lists, timeout, backend, pg_options, group_desc)
    return mine or GroupMember.NON_GROUP_MEMBER, groups


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: BackendName | Backend | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonGroupMember | None, list[ProcessGroup | NonGroupMember]]:
    """Collective. Make groups of the given world ranks.

    Args:
        ranks_per_subgroup_list: World ranks of each group, in the order of the group ranks. A rank
            is in one group at most.
        timeout: Time limit of every operation, in seconds or as a timedelta. The default is no
            limit.
        backend: As in :func:`new_group`.
        pg_options: Argument of torch; must be None.
        group_desc: Name of the groups in messages. The default is a number.

    Returns:
        The new group of this rank, or None if it is in no group; and a list with one entry per new
        group: the group, or ``GroupMember.NON_GROUP_MEMBER`` if this rank is outside.

    Raises:
        ValueError: The list is empty, a rank is in two groups or not in the world, or an argument
            has no meaning for MPI.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("ranks_per_subgroup_list needs the ranks of at least one group")
    lists = [list(ranks) for ranks in ranks_per_subgroup_list]
    return _enumerated(group_or_default(None), lists, timeout, backend, pg_options, group_desc)


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: BackendName | Backend | None = None,
) -> ProcessGroup | None:
    """Collective over the new ranks. Make groups of the given group ranks of a parent group.

    Args:
        parent_pg: Parent group, by default the default group.
        split_ranks: Group ranks in the parent, one list per new group. A rank is in one list at
            most. A list gives the order of the new group ranks.
        timeout: Time limit of every operation, in seconds or as a timedelta. The default is no
            limit.
        pg_options: Argument of torch; must be None.
        group_desc: Name of the groups in messages. The default is a number.
        backend: As in :func:`new_group`.

    Returns:
        The new group of this rank, or None if it is in no list.

    Raises:
        ValueError: The list is missing or empty, a rank is in two lists or not in the parent, or
            an argument has no meaning for MPI.
    """
    parent = group_or_default(parent_pg)
    if not split_ranks:
        raise ValueError("split_ranks needs the ranks of at least one group")
    for rank in itertools.chain(*split_ranks):
        if not 0 <= rank < parent.size():
            raise ValueError(f"group rank {rank} is not in a group of {parent.size()}")
    lists = [[parent.ranks[rank] for rank in ranks] for ranks in split_ranks]
    mine, _ = _enumerated(parent, lists, timeout, backend, pg_options, group_desc)
    return mine


def new_cartesian_group(
    shape: Sequence[int],
    periodic: bool | Sequence[bool] = False,
    reorder: bool = False,
    group: Group = None,
    timeout: Timeout = None,
    group_desc: str | None = None,
) -> CartesianGroup:
    """Collective. Arrange the ranks of a group on a grid, with neighbours (MPI 4.1, 8.5).

    Args:
        shape: Number of ranks along each dimension. The product is the number of ranks.
        periodic: Whether the last rank along a dimension is a neighbour of the first one: one bool
            for all dimensions, or one per dimension. The default is False.
        reorder: Let MPI number the ranks anew, so that neighbours are close. The default is False.
        group: Process group to arrange, by default the default group. It stays as it is.
        timeout: Time limit of every operation, in seconds or as a timedelta. The default is no
            limit.
        group_desc: Name of the new group in messages. The default is a number.

    Returns:
        A new group of the same ranks.

    Raises:
        ValueError: The shape does not fit the number of ranks, or this rank is outside the group.

    Example:
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> ring = dist.new_cartesian_group([dist.get_world_size()], periodic=True)
        >>> ring.shift(0)  # the ranks before and after this rank
        (0, 0)
    """
    parent, name = group_or_default(group), _name(group_desc)
    lengths = tuple(index(length) for length in shape)
    if not lengths or min(lengths) < 1 or math.prod(lengths) != parent.size():
        raise ValueError(
            f"the {parent.size()} members of group {parent.name!r} do not fill a grid of {lengths}"
        )
    single = isinstance(periodic, bool | np.bool_)
    around = [bool(periodic)] * len(lengths) if single else list(periodic)  # type: ignore[arg-type]
    if len(around) != len(lengths):
        raise ValueError(f"periodic={around} does not fit a grid of {lengths}: one answer each")
    with watched(f"the creation of group {name!r}", parent.comm.Get_group()):
        comm = parent.comm.Create_cart(lengths, around, reorder)
    made = CartesianGroup(comm, name, timeout, parent.device)
    destroy_with_default(made)
    return made


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = 0,
    pg_options: Any = None,
) -> ProcessGroup | NonGroupMember:
    """Collective over the ranks that stay. Make a group without some ranks of another group.

    Args:
        ranks_to_exclude: Group ranks to leave out. They need not take part.
        group: Process group to shrink, by default the default group. It stays as it is.
        shrink_flags: Argument of torch; must be 0.
        pg_options: Argument of torch; must be None.

    Returns:
        The smaller group. A rank that is left out gets ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        ValueError: No rank or every rank is left out, a rank is not in the group, or an argument
            has no meaning for MPI.
    """
    check_options(None, pg_options=pg_options)
    if shrink_flags:
        raise ValueError("shrink_flags has no meaning here: leave it 0")
    parent = group_or_default(group)
    gone = set(ranks_to_exclude)
    if not gone or not gone <= set(range(parent.size())) or len(gone) == parent.size():
        raise ValueError(
            f"ranks_to_exclude must be some, and not all, of the {parent.size()} group ranks, not "
            f"{sorted(gone)}"
        )
    stay = [rank for position, rank in enumerate(parent.ranks) if position not in gone]
    return _kept(make_group(parent, stay, f"{parent.name}/shrunk", None))


def make_groups(
    parent: ProcessGroup, lists: Sequence[Sequence[int]], name: str, timeout: Timeout = None
) -> list[ProcessGroup | None]:
    """Collective over the members of the lists. Make a group for each list of world ranks.

    Returns:
        The group of each list, or None if this rank is not in the list.

    Raises:
        ValueError: A rank is in two lists, twice in one, or is not a member of the parent.
    """
    seen: set[int] = set()
    for ranks in lists:
        both = seen.intersection(ranks)
        if both:
            raise ValueError(f"rank(s) {sorted(both)} are in more than one list: {list(lists)}")
        seen.update(ranks)
    groups = [
        make_group(parent, ranks, f"{name}/{number}", timeout) for number, ranks in enumerate(lists)
    ]
    for group in filter(None, groups):
        destroy_with_default(group)
    return groups


def _enumerated(
    parent: ProcessGroup,
    lists: list[list[int]],
    timeout: Timeout,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | NonGroupMember]]:
    check_options(backend, pg_options=pg_options)
    groups = make_groups(parent, lists, _name(group_desc), timeout)
    mine = next(filter(None, groups), None)
    return mine, [group or GroupMember.NON_GROUP_MEMBER for group in groups]


def _kept(group: ProcessGroup | None) -> ProcessGroup | NonGroupMember:
    if group is None:
        return GroupMember.NON_GROUP_MEMBER
    destroy_with_default(group)
    return group


def _name(description: str | None) -> str:
    return description or f"group {next(_numbers)}"
