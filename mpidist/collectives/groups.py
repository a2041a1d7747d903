"""Groups made from the default group or from another, by torch.distributed's functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mpidist.collectives.default import (
    Group,
    GroupMember,
    NonGroupMember,
    check_backend,
    given,
    keep,
)
from mpidist.group import CartesianGroup, ProcessGroup, make_cartesian, make_group, split
from mpidist.runtime import world
from mpidist.work import Timeout

_numbers = itertools.count(1)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonGroupMember:
    """Collective over the new members; others may call it, and get their answer at once.

    Args:
        ranks: World ranks of the members; None for all.
        timeout: Time limit of every operation; None for none.
        backend: None, or ``"mpi"``.
        pg_options: torch's; must be None.
        use_local_synchronization: torch's; here only the members take part in any case.
        group_desc: For messages.
        device_id: torch's; must be None.
        sort_ranks: Whether group ranks follow the world ranks; otherwise the order of ``ranks``.

    Returns:
        The group; ``GroupMember.NON_GROUP_MEMBER`` on other ranks.

    Raises:
        ValueError: A rank is there twice or not in the world, or an argument has no meaning here.
    """
    check_options(backend, pg_options=pg_options, device_id=device_id)
    parent = given(None)
    members = list(parent.ranks if ranks is None else ranks)
    group = make_group(
        parent, sorted(members) if sort_ranks else members, _name(group_desc), timeout
    )
    return _kept(group)


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonGroupMember, list[ProcessGroup | NonGroupMember]]:
    """Collective. Cut a group into groups of neighbouring ranks, all of one size.

    Args:
        group_size: Members of each; by default as many as this node has ranks.
        group: What is cut; the default group.
        timeout: Time limit of every operation; None for none.
        backend: None, or ``"mpi"``.
        pg_options: torch's; must be None.
        group_desc: For messages.

    Returns:
        The group of this rank, and for each group the group, or ``NON_GROUP_MEMBER``.

    Raises:
        ValueError: The size does not divide the group's.
    """
    parent = given(group)
    size = world().node.size if group_size is None else group_size
    if size < 1 or parent.size() % size:
        raise ValueError(
            f"a group of {parent.size()} cannot be cut into groups of {size}; give a group_size "
            "that divides it"
        )
    lists = [list(parent.ranks[start : start + size]) for start in range(0, parent.size(), size)]
    return _enumerated(parent, lists, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonGroupMember | None, list[ProcessGroup | NonGroupMember]]:
    """Collective. Groups of the given world ranks, each rank in one at most.

    Args:
        ranks_per_subgroup_list: The ranks of each group.
        timeout: Time limit of every operation; None for none.
        backend: None, or ``"mpi"``.
        pg_options: torch's; must be None.
        group_desc: For messages.

    Returns:
        The group of this rank, None if it is in none; for each group it, or ``NON_GROUP_MEMBER``.

    Raises:
        ValueError: The list is empty, or a rank is in two groups or not in the world.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("ranks_per_subgroup_list needs the ranks of at least one group")
    lists = [list(ranks) for ranks in ranks_per_subgroup_list]
    mine, groups = _enumerated(given(None), lists, timeout, backend, pg_options, group_desc)
    return (None if isinstance(mine, NonGroupMember) else mine), groups


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Collective over the new members. Groups of the given group ranks of a parent.

    Args:
        parent_pg: The parent; the default group.
        split_ranks: Group ranks in the parent, a list for each new group.
        timeout: Time limit of every operation; None for none.
        pg_options: torch's; must be None.
        group_desc: For messages.
        backend: None, or ``"mpi"``.

    Returns:
        The group of this rank, or None.

    Raises:
        ValueError: No ranks are given, or one is in two lists or not in the parent.
    """
    check_options(backend, pg_options=pg_options)
    parent = given(parent_pg)
    if not split_ranks:
        raise ValueError("split_ranks needs the ranks of at least one group")
    for rank in itertools.chain(*split_ranks):
        if not 0 <= rank < parent.size():
            raise ValueError(f"group rank {rank} is not in a group of {parent.size()}")
    lists = [[parent.ranks[rank] for rank in ranks] for ranks in split_ranks]
    groups = [group for group in split(parent, lists, _name(group_desc), timeout) if group]
    for group in groups:
        keep(group)
    return groups[0] if groups else None


def new_cartesian_group(
    shape: Sequence[int],
    periodic: bool | Sequence[bool] = False,
    reorder: bool = False,
    group: Group = None,
    timeout: Timeout = None,
    group_desc: str | None = None,
) -> CartesianGroup:
    """Collective over a group. The same members on a grid, with neighbours (MPI 4.1, 8.5).

    Args:
        shape: Members along each dimension; their product is the group's size.
        periodic: Whether the last along a dimension is a neighbour of the first; one answer for
            all dimensions, or one each.
        reorder: Let MPI give other ranks to the members, so that neighbours are close.
        group: Whose members; the default group.
        timeout: Time limit of every operation; None for none.
        group_desc: For messages.

    Returns:
        A group of its own.

    Raises:
        ValueError: The shape does not fit the group's size, or this rank is not a member.
    """
    made = make_cartesian(given(group), shape, periodic, reorder, _name(group_desc), timeout)
    keep(made)
    return made


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = 0,
    pg_options: Any = None,
) -> ProcessGroup | NonGroupMember:
    """Collective over those who stay. A group without some of its members.

    Args:
        ranks_to_exclude: Group ranks of those who go. They need not take part.
        group: The group; the default group. It stays as it is.
        shrink_flags: torch's; must be 0.
        pg_options: torch's; must be None.

    Returns:
        The smaller group; ``NON_GROUP_MEMBER`` on those who go.

    Raises:
        ValueError: Nobody goes, nobody stays, or a rank is not in the group.
    """
    check_options(None, pg_options=pg_options)
    if shrink_flags:
        raise ValueError("shrink_flags has no meaning here: leave it 0")
    parent = given(group)
    gone = set(ranks_to_exclude)
    if not gone or not gone <= set(range(parent.size())) or len(gone) == parent.size():
        raise ValueError(
            f"ranks_to_exclude must be some, and not all, of the {parent.size()} group ranks, not "
            f"{sorted(gone)}"
        )
    stay = [rank for position, rank in enumerate(parent.ranks) if position not in gone]
    return _kept(make_group(parent, stay, f"{parent.name}/shrunk", None))


def _enumerated(
    parent: ProcessGroup,
    lists: list[list[int]],
    timeout: Timeout,
    backend: str | None,
    pg_options: Any,
    group_desc: str | None,
) -> tuple[ProcessGroup | NonGroupMember, list[ProcessGroup | NonGroupMember]]:
    check_options(backend, pg_options=pg_options)
    groups = [_kept(group) for group in split(parent, lists, _name(group_desc), timeout)]
    mine = next((g for g in groups if isinstance(g, ProcessGroup)), GroupMember.NON_GROUP_MEMBER)
    return mine, groups


def _kept(group: ProcessGroup | None) -> ProcessGroup | NonGroupMember:
    if group is None:
        return GroupMember.NON_GROUP_MEMBER
    keep(group)
    return group


def _name(description: str | None) -> str:
    return description or f"group {next(_numbers)}"


def check_options(backend: str | None, **options: Any) -> None:
    """Local. ValueError if a backend is unknown, or an option of torch's is given."""
    check_backend(backend)
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} has no meaning here: leave it None")
