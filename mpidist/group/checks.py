"""Checks of the arguments of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.buffers.host_view import Array
from mpidist.buffers.lists import host_views
from mpidist.group.operation import GroupInfo


def check_list(group: GroupInfo, name: str, arrays: Sequence[Array], like: Array) -> None:
    """Raise ValueError unless a list has one array for each member, all like another array."""
    if len(arrays) != group.size:
        raise ValueError(
            f"{name} of group {group.name!r} needs {group.size} arrays, not {len(arrays)}"
        )
    shape, dtype = like.shape, like.dtype
    for rank, array in enumerate(arrays):
        if array.shape != shape or (array.dtype is not dtype and array.dtype != dtype):
            raise ValueError(
                f"{name} of {like.dtype}{list(like.shape)} has {array.dtype}{list(array.shape)} "
                f"in its list for group rank {rank}"
            )


def check_multiple(group: GroupInfo, name: str, whole: Array, part: Array) -> None:
    """Raise ValueError unless one array is as large as one other for each member."""
    if whole.dtype is not part.dtype and whole.dtype != part.dtype:
        raise ValueError(f"{name} needs one dtype, not {whole.dtype} and {part.dtype}")
    if whole.size != group.size * part.size:
        raise ValueError(
            f"{name} of group {group.name!r} needs {group.size} times as many elements on one "
            f"side as on the other, not {whole.size} and {part.size}"
        )


def list_of_root(
    group: GroupInfo, name: str, arrays: Sequence[Any] | None, root: int, *, read: bool
) -> list[Array] | None:
    """Return the list that only the root gives; None on other ranks.

    Args:
        group: The facts about the group.
        name: The name of the argument.
        arrays: The list, or None.
        root: Group rank of the root.
        read: Whether the values are used; see :func:`mpidist.host_view`.

    Raises:
        ValueError: The root gives none, or another member gives one.
    """
    _check_giver(group, name, arrays, root)
    if group.rank != root:
        return None
    return host_views(arrays or (), read=read)


def list_of_root_objects(
    group: GroupInfo, name: str, objects: Sequence[Any] | None, root: int
) -> Any:
    """Return the list of objects that only the root gives, one for each member; else None.

    Raises:
        ValueError: It has another length, the root gives none, or another member gives one.
    """
    is_root = group.rank == root
    _check_giver(group, name, objects, root)
    if is_root and objects is not None and len(objects) != group.size:
        raise ValueError(
            f"{name} of group {group.name!r} needs {group.size} entries, not {len(objects)}"
        )
    return objects if is_root else None


def _check_giver(group: GroupInfo, name: str, given: Sequence[Any] | None, root: int) -> None:
    if group.rank == root and given is None:
        raise ValueError(f"{name} is missing on the root, rank {group.ranks[root]}")
    if group.rank != root and given is not None and len(given):
        raise ValueError(
            f"{name} is only for the root, rank {group.ranks[root]}; leave it None on rank "
            f"{group.ranks[group.rank]}"
        )
