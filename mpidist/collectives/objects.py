"""Object collectives of torch.distributed; each is a method of a group.

``device`` and ``use_batch`` are torch's arguments, and have no use here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.collectives.default import Group, acting
from mpidist.collectives.documentation import as_method


@as_method
def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, weights_only: bool = False
) -> None:
    """Collective. See :meth:`ProcessGroup.all_gather_object`."""
    acts = acting(group)
    if acts is not None:
        acts.all_gather_object(object_list, obj, weights_only)


@as_method
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Collective. See :meth:`ProcessGroup.gather_object`."""
    acts = acting(group)
    if acts is not None:
        acts.gather_object(obj, object_gather_list, dst, group_dst, weights_only)


@as_method
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Collective. See :meth:`ProcessGroup.broadcast_object_list`."""
    acts = acting(group)
    if acts is not None:
        acts.broadcast_object_list(object_list, src, group_src, weights_only)


@as_method
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Collective. See :meth:`ProcessGroup.scatter_object_list`."""
    acts = acting(group)
    if acts is not None:
        acts.scatter_object_list(
            scatter_object_output_list, scatter_object_input_list, src, group_src, weights_only
        )


@as_method
def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Point to point. See :meth:`ProcessGroup.send_object_list`."""
    acts = acting(group)
    if acts is not None:
        acts.send_object_list(object_list, dst, group_dst)


@as_method
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Point to point. See :meth:`ProcessGroup.recv_object_list`."""
    acts = acting(group)
    return -1 if acts is None else acts.recv_object_list(object_list, src, group_src, weights_only)
