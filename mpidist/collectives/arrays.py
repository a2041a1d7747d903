"""The collectives of torch.distributed on arrays, on the default group or on a given group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, overload

import numpy as np

from mpidist.buffers.reduce_op import ReduceOp, ReduceOpLike, is_direct
from mpidist.collectives.backends import check_options
from mpidist.collectives.default import Group, group_if_member
from mpidist.group import Coalescing
from mpidist.work import Timeout, Work

# Each function calls the method of the group directly: a shared wrapper would add a Python frame to
# every call. The first overload takes async_op=True as a keyword only. All other calls return
# Work | None.


@overload
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    *,
    async_op: Literal[True],
    group_src: int | None = None,
) -> Work: ...
@overload
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None: ...
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Collective. Copy the array of one rank to all ranks of a group.

    Args:
        tensor: Array with the same shape and dtype on all ranks, of any dtype without Python
            objects. It must be writable on all ranks but the source.
        src: World rank of the source. Give ``src`` or ``group_src``.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.
        group_src: Group rank of the source.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: The array is read-only, or the source is missing or not in the group.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.

    Example:
        >>> import numpy as np
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> weights = np.arange(3.0) if dist.get_rank() == 0 else np.empty(3)
        >>> dist.broadcast(weights, src=0)
        >>> weights
        array([0., 1., 2.])
    """
    pg = group_if_member(group)
    return None if pg is None else pg.broadcast(tensor, src, async_op, group_src)


@overload
def all_reduce(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, *, async_op: Literal[True]
) -> Work: ...
@overload
def all_reduce(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None: ...
def all_reduce(
    tensor: Any, op: ReduceOpLike = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Collective. Reduce an array over all ranks of a group. Each rank gets the result in place.

    Args:
        tensor: Writable array with the same shape and dtype on all ranks. float16, bfloat16 and
            float8 are reduced in float32. Integers wrap around. Bools are reduced by logic: SUM is
            "any", PRODUCT is "all".
        op: Reduction or its name, by default the sum. AVG and PREMUL_SUM need a floating or complex
            dtype.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        TypeError: The reduction is not defined for the dtype.
        ValueError: The array is read-only, the reduction is unknown, or the members of the group
            call different collectives.
        DeadlineExceededError: The time limit of the group has passed.
        DistBackendError: MPI, NCCL or CUDA failed.
        GroupBrokenError: An earlier blocking collective of the group is still pending past its
            limit, an operation failed after some of its MPI calls, or the ranks called different
            collectives.

    Example:
        >>> import numpy as np
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> gradient = np.full(3, dist.get_rank() + 1.0)
        >>> dist.all_reduce(gradient, op="mean")
        >>> work = dist.all_reduce(gradient, async_op=True)
        >>> work.wait()  # the result is in the array
        True
        >>> gradient
        array([1., 1., 1.])
    """
    pg = group_if_member(group)
    return None if pg is None else pg.all_reduce(tensor, op, async_op)


@overload
def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None: ...
def all_reduce_coalesced(
    tensors: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. Reduce several arrays over all ranks of a group, in place.

    Arrays of up to 32 KiB with the same dtype are fused into buffers of at most 256 KiB.

    Args:
        tensors: Writable arrays with the same shapes and dtypes, in the same order, on all ranks.
            No two of them may share memory.
        op: Reduction of each array, as in :func:`all_reduce`. The default is the sum.
        group: Process group, by default the default group.
        async_op: Return one Work for all arrays without waiting.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        TypeError: The reduction is not defined for a dtype.
        ValueError: An array is read-only or shares memory with another, or the reduction is
            unknown.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.all_reduce_coalesced(tensors, op, async_op)


@overload
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    async_op: Literal[True],
    group_dst: int | None = None,
) -> Work: ...
@overload
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None: ...
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collective. Reduce an array over all ranks of a group. One rank gets the result in place.

    Args:
        tensor: Array with the same shape and dtype on all ranks. Only the destination writes to
            its array. The dtypes are those of :func:`all_reduce`.
        dst: World rank of the destination. Give ``dst`` or ``group_dst``.
        op: Reduction, as in :func:`all_reduce`. The default is the sum.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.
        group_dst: Group rank of the destination.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        TypeError: The reduction is not defined for the dtype.
        ValueError: The array of the destination is read-only, the destination is missing or not in
            the group, or the reduction is unknown.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.reduce(tensor, dst, op, async_op, group_dst)


@overload
def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Group = None, *, async_op: Literal[True]
) -> Work: ...
@overload
def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Group = None, async_op: bool = False
) -> Work | None: ...
def all_gather(
    tensor_list: Sequence[Any], tensor: Any, group: Group = None, async_op: bool = False
) -> Work | None:
    """Collective. Gather an array of every rank into a list on all ranks of a group.

    Args:
        tensor_list: One writable array per rank, in the order of the group ranks. Each has the
            shape and dtype of ``tensor``.
        tensor: Array of this rank, with the same shape and dtype on all ranks.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: The list does not have one array per rank, or an array is read-only or has
            another shape or dtype.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.

    Example:
        >>> import numpy as np
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> parts = [np.empty(2) for _ in range(dist.get_world_size())]
        >>> dist.all_gather(parts, np.array([1.0, 2.0]))
        >>> parts[0]
        array([1., 2.])
    """
    pg = group_if_member(group)
    return None if pg is None else pg.all_gather(tensor_list, tensor, async_op)


@overload
def all_gather_single(
    output_tensor: Any, input_tensor: Any, group: Group = None, *, async_op: Literal[True]
) -> Work: ...
@overload
def all_gather_single(
    output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False
) -> Work | None: ...
def all_gather_single(
    output_tensor: Any, input_tensor: Any, group: Group = None, async_op: bool = False
) -> Work | None:
    """Collective. Gather an array of every rank into one array on all ranks of a group.

    :func:`all_gather_into_tensor` is another name of this function.

    Args:
        output_tensor: Writable array of the dtype of ``input_tensor``, with as many elements as
            the arrays of all ranks together. The arrays follow each other in C order, by group
            rank: both ``(ranks * n, ...)`` and ``(ranks, n, ...)`` serve for ``(n, ...)``.
        input_tensor: Array of this rank, with the same shape and dtype on all ranks.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: The output is read-only, or its size or dtype does not fit.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.

    Example:
        >>> import numpy as np
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> rows = np.empty((dist.get_world_size(), 2))  # one row per rank
        >>> dist.all_gather_single(rows, np.array([1.0, 2.0]))
        >>> rows[dist.get_rank()]
        array([1., 2.])
    """
    pg = group_if_member(group)
    return None if pg is None else pg.all_gather_into_tensor(output_tensor, input_tensor, async_op)


all_gather_into_tensor = all_gather_single  # torch 2.13 renamed the function and keeps both names


@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Work | None: ...
def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Any]],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. Gather several arrays of every rank on all ranks of a group.

    Args:
        output_tensor_lists: One list per rank, in the order of the group ranks. Each has one
            writable array for every input, of the shape and dtype of that input.
        input_tensor_list: Arrays of this rank, with the same shapes and dtypes on all ranks.
        group: Process group, by default the default group.
        async_op: Return one Work for all arrays without waiting.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: A list has another length, or an array is read-only or has another shape or
            dtype.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return (
        None
        if pg is None
        else pg.all_gather_coalesced(output_tensor_lists, input_tensor_list, async_op)
    )


@overload
def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    *,
    async_op: Literal[True],
    group_dst: int | None = None,
) -> Work: ...
@overload
def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None: ...
def gather(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Collective. Gather an array of every rank into a list on one rank of a group.

    Args:
        tensor: Array of this rank, with the same shape and dtype on all ranks.
        gather_list: On the destination: one writable array per rank, in the order of the group
            ranks, of the shape and dtype of ``tensor``. On the other ranks: None.
        dst: World rank of the destination. The default is the first rank of the group.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.
        group_dst: Group rank of the destination, in place of ``dst``.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: The list is missing on the destination, given on another rank or of another
            length, an array is read-only or has another shape or dtype, or the destination is not
            in the group.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.gather(tensor, gather_list, dst, async_op, group_dst)


@overload
def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    async_op: Literal[True],
    group_src: int | None = None,
) -> Work: ...
@overload
def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None: ...
def scatter(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Collective. Scatter a list of arrays from one rank over all ranks of a group.

    Args:
        tensor: Writable array that receives, with the same shape and dtype on all ranks.
        scatter_list: On the source: one array per rank, in the order of the group ranks, of the
            shape and dtype of ``tensor``. On the other ranks: None.
        src: World rank of the source. The default is the first rank of the group.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.
        group_src: Group rank of the source, in place of ``src``.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: The list is missing on the source, given on another rank or of another length,
            an array is read-only or has another shape or dtype, or the source is not in the group.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.scatter(tensor, scatter_list, src, async_op, group_src)


@overload
def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None: ...
def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. Reduce a list of arrays over all ranks. Each rank gets one of the results.

    Args:
        output: Writable array that receives the result of this rank's place in the list.
        input_list: One array per rank, in the order of the group ranks. All arrays of all ranks
            have the shape and dtype of ``output``.
        op: Reduction, as in :func:`all_reduce`. The default is the sum.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        TypeError: The reduction is not defined for the dtype.
        ValueError: The list has another length, an array has another shape or dtype, the output is
            read-only, or the reduction is unknown.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.reduce_scatter(output, input_list, op, async_op)


@overload
def reduce_scatter_single(
    output: Any,
    input: Any,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def reduce_scatter_single(
    output: Any,
    input: Any,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None: ...
def reduce_scatter_single(
    output: Any,
    input: Any,
    op: ReduceOpLike = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. Reduce an array over all ranks of a group. Each rank gets one part of the result.

    :func:`reduce_scatter_tensor` is another name of this function.

    Args:
        output: Writable array that receives this rank's part.
        input: Array of the dtype of ``output``, with as many elements as the outputs of all ranks
            together. The parts follow each other in C order, by group rank: both
            ``(ranks * n, ...)`` and ``(ranks, n, ...)`` serve for an output ``(n, ...)``.
        op: Reduction, as in :func:`all_reduce`. The default is the sum.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        TypeError: The reduction is not defined for the dtype.
        ValueError: The sizes or dtypes do not fit, the output is read-only, or the reduction is
            unknown.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.reduce_scatter_tensor(output, input, op, async_op)


reduce_scatter_tensor = reduce_scatter_single  # torch 2.13 renamed the function, as above


@overload
def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Work | None: ...
def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. Send an array to every rank of a group and receive an array from every rank.

    Args:
        output_tensor_list: One writable array per rank, in the order of the group ranks. Each is
            as large as the array that its rank sends.
        input_tensor_list: One array per rank. Sizes may differ. All arrays of both lists have one
            dtype.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: A list does not have one array per rank, the dtypes differ, an output is
            read-only, or the two arrays of this rank itself differ in size.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.all_to_all(output_tensor_list, input_tensor_list, async_op)


@overload
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None: ...
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Collective. Split an array by rows, send one part to every rank and receive one from each.

    If one rank gives split sizes, all ranks must give them, even equal ones: MPI carries equal
    parts by MPI_Alltoall and unequal parts by messages.

    Args:
        output: Writable array of the dtype of ``input``, with rows of the same size. The parts
            follow each other along the first dimension, by group rank.
        input: Array whose rows, along the first dimension, are sent.
        output_split_sizes: Number of rows from each rank. The default is equal parts.
        input_split_sizes: Number of rows to each rank. The default is equal parts.
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        ValueError: The split sizes do not add up to the rows, the rows cannot be divided equally,
            the dtypes differ, or the output is read-only.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return (
        None
        if pg is None
        else pg.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)
    )


@overload
def barrier(
    group: Group = None, *, async_op: Literal[True], device_ids: Any = None, timeout: Timeout = None
) -> Work: ...
@overload
def barrier(
    group: Group = None, async_op: bool = False, device_ids: Any = None, timeout: Timeout = None
) -> Work | None: ...
def barrier(
    group: Group = None, async_op: bool = False, device_ids: Any = None, timeout: Timeout = None
) -> Work | None:
    """Collective. Wait until all ranks of a group have entered the barrier.

    Args:
        group: Process group, by default the default group.
        async_op: Return a Work without waiting for the result.
        device_ids: Argument of torch without effect: MPI has no devices.
        timeout: Time limit of this barrier, in seconds or as a timedelta. The default is the limit
            of the group.

    Returns:
        A Work if ``async_op``, else None. A rank outside the group gets None, with a warning.

    Raises:
        DeadlineExceededError: The time limit has passed.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.
    """
    pg = group_if_member(group)
    return None if pg is None else pg.barrier(async_op, timeout)


def monitored_barrier(
    group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """Collective. Run a barrier that names the ranks that do not come in time.

    If a rank is late, the barrier fails on all ranks. The first rank of the group collects a
    message from every other rank and tells them which ranks are missing. If the first rank itself
    is missing, the others notice after twice the time limit. A late rank is told that it is late.
    A rank outside the group does nothing but warn.

    Args:
        group: Process group, by default the default group.
        timeout: Time limit, in seconds or as a timedelta. The default is the limit of the group,
            or 30 minutes.
        wait_all_ranks: Name all missing ranks. The default is to name the first one.

    Raises:
        DeadlineExceededError: A rank has not come in time. The message names it.
    """
    pg = group_if_member(group)
    if pg is not None:
        pg.monitored_barrier(timeout, wait_all_ranks)


@contextmanager
def coalescing_manager(
    group: Group = None, device: Any = None, async_ops: bool = False
) -> Iterator[Coalescing]:
    """Collective. Begin the collectives that are called in a ``with`` block together, at its end.

    ``all_reduce`` and ``broadcast`` calls for arrays of up to 32 KiB are fused into buffers of at
    most 256 KiB if they agree in reduction, root and dtype. Broadcasts may differ in dtype. The
    other collectives start one by one. Arrays hold their results after the block, or after
    ``wait()`` of the object that the block yields.

    All ranks must call the same collectives in the same order. Collectives in the block return
    None. No collective may use memory to which another one writes, and no array may change in the
    block. Object collectives and ``all_gather_ragged`` are a ValueError in the block. Messages are
    not collected. If the block raises, no collective begins. torch's function is called
    ``_coalescing_manager``.

    Args:
        group: Process group, by default the default group. Calls in the block must name the same
            group.
        device: Argument of torch; must be None.
        async_ops: Leave the block without waiting.

    Yields:
        An object with ``wait(timeout)`` and, if ``async_ops``, the attribute ``work``.

    Raises:
        ValueError: A device is given, or two collectives use memory to which one of them writes.
        DistError, ValueError: As in every collective; see :func:`all_reduce`.

    Example:
        >>> import numpy as np
        >>> import mpidist as dist
        >>> group = dist.init_process_group()
        >>> gradients = [np.ones(3), np.ones((2, 2))]
        >>> with dist.coalescing_manager(async_ops=True) as manager:
        ...     for gradient in gradients:
        ...         dist.all_reduce(gradient)
        >>> manager.wait()
        True
        >>> gradients[0]
        array([1., 1., 1.])
    """
    check_options(device=device)
    pg = group_if_member(group)
    if pg is None:
        yield Coalescing()
        return
    with pg.coalesce(async_ops) as begun:
        yield begun


def supports_complex(reduceOp: ReduceOpLike) -> bool:
    """Return whether a reduction is defined for complex arrays.

    Args:
        reduceOp: The reduction. SUM, AVG, PRODUCT and PREMUL_SUM are defined. torch has no PRODUCT.

    Raises:
        ValueError: The reduction is unknown.
    """
    kind = ReduceOp.of(reduceOp)
    return kind.name in ("AVG", "PREMUL_SUM") or is_direct(np.dtype(np.complex128), kind)
