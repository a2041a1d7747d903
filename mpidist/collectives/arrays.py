"""Collectives of torch.distributed on arrays; each is a method of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpidist.collectives.default import Group, acting
from mpidist.collectives.documentation import as_method
from mpidist.group import Coalescing
from mpidist.reduce_op import ReduceOp, Reduction
from mpidist.work import Timeout, Work


@as_method
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


@as_method
def all_reduce(
    tensor: Any,
    op: Reduction | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_reduce`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_reduce(tensor, op, async_op)


@as_method
def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: Reduction | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.all_reduce_coalesced`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.all_reduce_coalesced(tensors, op, async_op)


@as_method
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: Reduction | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.reduce`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.reduce(tensor, dst, op, async_op, group_dst)


@as_method
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


@as_method
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


@as_method
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


@as_method
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


@as_method
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


@as_method
def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: Reduction | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.reduce_scatter`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.reduce_scatter(output, input_list, op, async_op)


@as_method
def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: Reduction | str = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.reduce_scatter_tensor`."""
    acts = acting(group)
    if acts is None:
        return None
    return acts.reduce_scatter_tensor(output, input, op, async_op)


@as_method
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


@as_method
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


@as_method
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: Timeout = None,
) -> Work | None:
    """Collective. See :meth:`ProcessGroup.barrier`; ``device_ids`` is torch's, and has no use."""
    acts = acting(group)
    return None if acts is None else acts.barrier(async_op, timeout)


@as_method
def monitored_barrier(
    group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """Collective. See :meth:`ProcessGroup.monitored_barrier`."""
    acts = acting(group)
    if acts is not None:
        acts.monitored_barrier(timeout, wait_all_ranks)


@contextmanager
def coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> Iterator[Coalescing]:
    """Collective. See :meth:`ProcessGroup.coalesce`; torch's ``_coalescing_manager``.

    Args:
        group: Whose operations; calls in the block must name it, too.
        device: Not needed; must be None.
        async_ops: End the block at once.
    """
    if device is not None:
        raise ValueError("device has no meaning here: leave it None")
    acts = acting(group)
    if acts is None:
        yield Coalescing()
        return
    with acts.coalesce(async_ops) as begun:
        yield begun
