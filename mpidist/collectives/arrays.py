"""Collectives of torch.distributed on arrays; each is a method of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.arrays import ReduceOp
from mpidist.collectives.default import Group, acting
from mpidist.work import Timeout, Work


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.broadcast`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.broadcast(tensor, src, async_op, group_src)


def all_reduce(
    tensor: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_reduce`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_reduce(tensor, op, async_op)


def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_reduce_coalesced`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_reduce_coalesced(tensors, op, async_op)


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.reduce`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.reduce(tensor, dst, op, async_op, group_dst)


def all_gather(
    tensor_list: Sequence[Any],
    tensor: Any,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_gather`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_gather(tensor_list, tensor, async_op)


def all_gather_into_tensor(
    output_tensor: Any,
    input_tensor: Any,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_gather_into_tensor`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_gather_into_tensor(output_tensor, input_tensor, async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_gather_coalesced`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_gather_coalesced(output_tensor_lists, input_tensor_list, async_op)


def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.gather`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.gather(tensor, gather_list, dst, async_op, group_dst)


def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.scatter`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.scatter(tensor, scatter_list, src, async_op, group_src)


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.reduce_scatter`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.reduce_scatter(output, input_list, op, async_op)


def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.reduce_scatter_tensor`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.reduce_scatter_tensor(output, input, op, async_op)


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_to_all`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_to_all(output_tensor_list, input_tensor_list, async_op)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_to_all_single`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: Timeout = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.barrier`; ``device_ids`` is torch's, and has no use."""
    acts = acting(group)
    return None if acts is None else acts.barrier(async_op, timeout)


def monitored_barrier(
    group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """Collective. See :meth:`ProcessGroup.monitored_barrier`."""
    acts = acting(group)
    if acts is not None:
        acts.monitored_barrier(timeout, wait_all_ranks)
