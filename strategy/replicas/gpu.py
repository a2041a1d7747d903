"""Arrays on the GPUs of replicas: downloads for pushes, uploads after pulls, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import ClusterSpec, host_view
from mpidist.gpu import (
    Download,
    HostStaging,
    Upload,
    check_dtype,
    cupy,
    current_stream,
    device_count,
    on_device,
    record_event,
)
from strategy.array_like import IndexedSlices, is_on_gpu, on_host
from strategy.protocol.cluster import Task
from strategy.replicas.nest import tree_map

Array = NDArray[Any]
Handed = tuple[int, Any]
"""A GPU index, and an event on that GPU."""


def chosen_gpus(
    wanted: int, replicas: int, spec: ClusterSpec, workers: Sequence[Task], me: Task
) -> tuple[int, ...]:
    """Return CuPy's index of the GPU of each replica of a worker; empty if ``wanted`` is 0.

    The workers of a host may all see all of its GPUs, so they take the GPUs in turn.

    Args:
        wanted: GPUs of each worker.
        replicas: Replicas of each worker.
        spec: The cluster.
        workers: The workers of the cluster.
        me: This worker.

    Raises:
        FailedPreconditionError: CuPy cannot be imported, or can use no GPU.
        ValueError: This process sees fewer GPUs, or there are fewer replicas than GPUs.
    """
    if not wanted:
        return ()
    if replicas < wanted:
        raise ValueError(
            f"num_replicas_per_worker={replicas} leaves GPUs idle: num_gpus_per_worker is {wanted}"
        )
    count = device_count()
    if count < wanted:
        raise ValueError(
            f"{me[0]} {me[1]} sees {count} GPUs, and num_gpus_per_worker is {wanted}: look at "
            "CUDA_VISIBLE_DEVICES, and at what the batch system gives each task"
        )
    own = _host(spec, me)
    before = sum(_host(spec, worker) == own for worker in workers[: workers.index(me)])
    return tuple((before * wanted + number % wanted) % count for number in range(replicas))


def brought(array: Array, gpu: int | None) -> Any:
    """Return a host array as a CuPy array on a GPU, or unchanged if ``gpu`` is None."""
    if gpu is None:
        return array
    return pulled(
        "an array", array.shape, array.dtype, None, gpu, lambda view: np.copyto(view, array)
    )


def brought_like(value: Any, like: Any, gpu: int | None) -> Any:
    """Return a value on a GPU if ``like`` is on a GPU, else unchanged; IndexedSlices likewise."""
    if isinstance(value, IndexedSlices):
        if not isinstance(like, IndexedSlices):
            return value
        places = ((value.values, like.values), (value.indices, like.indices))
        return IndexedSlices(*(brought_like(one, other, gpu) for one, other in places))
    if not is_on_gpu(like):
        return value
    here = cupy().cuda.runtime.getDevice() if gpu is None else gpu
    return brought(np.asarray(value), here)


def pulled(
    whose: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    out: Any,
    gpu: int | None,
    pull: Callable[[Array], None],
) -> Any:
    """Pull into an array on the host or on a GPU.

    Args:
        whose: The variable, for messages: ``"variable 'w'"``.
        shape: Shape of the array.
        dtype: Dtype of the array.
        out: Output array; None for a fresh array.
        gpu: GPU index of a fresh array; None for the host.
        pull: Fills a host array.

    Returns:
        The array. For an array on a GPU, the stream that uses it waits until it is filled.

    Raises:
        ValueError: ``out`` does not fit.
        TypeError: CuPy does not have the dtype.
        ResourceExhaustedError: The GPU has no memory.
    """
    view, land = landing(whose, shape, dtype, out, gpu)
    pull(view)
    return land()


def landing(
    whose: str, shape: tuple[int, ...], dtype: np.dtype[Any], out: Any, gpu: int | None
) -> tuple[Array, Callable[[], Any]]:
    """Return host memory to pull into, and a function that copies the memory to its destination.

    A fresh array on a GPU is filled concurrently with the work that the current stream has queued.
    A given array on a GPU is filled after the work on its stream.

    Args:
        whose: See :func:`pulled`, which raises the same errors.
        shape: See :func:`pulled`.
        dtype: See :func:`pulled`.
        out: See :func:`pulled`.
        gpu: See :func:`pulled`.

    Returns:
        The memory, and a function that returns the array. Call the function after filling the
        memory.
    """
    if out is None and gpu is not None:
        check_dtype(dtype, whose)
        fresh = Upload(gpu, shape, dtype)
        return fresh.host, fresh.start
    out = np.empty(shape, dtype) if out is None else out
    view = out if out.__class__ is np.ndarray else host_view(out, read=False)
    if view.shape != shape or view.dtype != dtype or not view.flags.carray:
        why = "" if view.flags.carray else " that is read-only, or not C-contiguous"
        raise ValueError(
            f"out must be a writable C-contiguous {dtype}{list(shape)} for {whose}, not a "
            f"{view.dtype}{list(view.shape)}{why}"
        )

    def land() -> Any:
        if isinstance(view, HostStaging):
            view.upload()
        return out

    return view, land


def leaving(value: Any) -> Any:
    """Start to copy an array from its GPU to the host. Return a :class:`Download`.

    The arrays of IndexedSlices are copied likewise. Other values are returned unchanged.

    Raises:
        ResourceExhaustedError: The GPU has no memory to pack a strided array.
        DistBackendError: CUDA failed.
    """
    if isinstance(value, IndexedSlices):
        return IndexedSlices(leaving(value.values), leaving(value.indices))
    return Download(value) if is_on_gpu(value) else value


def handed_over(gpu: int | None) -> Handed | None:
    """Record an event behind this thread's work on its GPU. Return None without a GPU."""
    if gpu is None:
        return None
    with on_device(gpu, "handing over what a replica has made"):
        return gpu, record_event(current_stream(gpu))


def go_behind(events: Iterable[Handed | None]) -> None:
    """Make the current streams of this thread wait for events of other threads."""
    for handed in filter(None, events):
        with on_device(handed[0], "going on with what a replica has made"):
            _wait_for([handed], current_stream(handed[0]))


def _wait_for(events: Iterable[Handed | None], stream: Any) -> None:
    """Make a stream wait for events. Its device must be current, as the default stream requires."""
    for _, event in filter(None, events):
        stream.wait_event(event)


def usable_elsewhere(value: Any) -> Any:
    """Return a value that another thread may use after the event of :func:`handed_over`.

    CuPy arrays stay on their GPU. The arrays of other packages are copied to the host, because only
    this thread knows their stream. IndexedSlices are copied to the host, too.
    """
    if isinstance(value, IndexedSlices):
        return IndexedSlices(on_host(value.values), on_host(value.indices))
    return value if _is_of_cupy(value) else on_host(value)


def can_be_added(values: Sequence[Any]) -> bool:
    """Return whether :func:`added` accepts these values. Other values are added on the host."""
    if len(values) == 1 or not all(map(_is_of_cupy, values)):
        return False
    return len({(value.shape, value.dtype) for value in values}) == 1 and all(
        value.dtype.char in "efd" and value.flags.c_contiguous for value in values
    )


def added(arrays: Sequence[Any], dtype: np.dtype[Any], divisor: int) -> Array:
    """Add CuPy arrays in order on the GPU of the first array. Return the sum as a host array.

    Args:
        arrays: Arrays on any GPUs; see :func:`can_be_added`.
        dtype: Dtype of the sum.
        divisor: Divisor of the sum.

    Raises:
        ResourceExhaustedError: The GPU has no memory for the sum.
        DistBackendError: CUDA failed.
    """
    gpu, *others = dict.fromkeys(int(array.device.id) for array in arrays)
    made = [handed_over(other) for other in others]
    with on_device(gpu, "adding up what replicas have made") as package:
        _wait_for(made, current_stream(gpu))
        total = arrays[0].astype(dtype)
        for array in arrays[1:]:
            total += _near(array, gpu, package)
        if divisor != 1:
            total /= divisor
    # host_view() waits until all arrays have been read. The caller may keep the sum, so copy it out
    # of pinned memory, which is scarce.
    return np.array(host_view(total))


def _is_of_cupy(value: Any) -> bool:
    return is_on_gpu(value) and isinstance(value, cupy().ndarray)


def _near(array: Any, gpu: int, package: Any) -> Any:
    """Return a CuPy array on ``gpu``, the current GPU. Copy the array if it is on another GPU."""
    there = int(array.device.id)
    if there == gpu:
        return array
    near = package.empty(array.shape, array.dtype)
    places = (near.data.ptr, gpu, array.data.ptr, there)
    package.cuda.runtime.memcpyPeerAsync(*places, array.nbytes, current_stream(gpu).ptr)
    return near


def _host(spec: ClusterSpec, task: Task) -> str:
    return spec.task_address(*task).rpartition(":")[0]


def to_host_ahead(values: Any) -> Any:
    """Start to copy arrays from their GPU to the host, without waiting.

    ``apply_gradients`` also starts these copies, after all work that the stream of the arrays has
    queued by then. Call this function right after queueing the computation of gradients. Then you
    can queue other work before the push, such as the next step::

        values = read_values(weights)
        leaving = None
        for batch in batches:
            gradients = gradients_of(values, batch)  # queued
            if leaving is not None:  # the GPU computes meanwhile
                optimizer.apply_gradients(zip(leaving, weights))
            leaving = to_host_ahead(gradients)
            values = read_values(weights)
        optimizer.apply_gradients(zip(leaving, weights))

    In this example the values lack the push of the step before, as if another worker had made that
    push.

    Args:
        values: Arrays on GPUs, :class:`IndexedSlices` of them, or a tree of both: nested tuples,
            lists, dicts or dataclasses.

    Returns:
        The same structure with a :class:`mpidist.gpu.Download` in place of each array on a GPU.
        ``apply_gradients`` and variables accept a Download as an array. Do not change an array
        before they have used its Download. Other values are returned unchanged.

    Raises:
        ResourceExhaustedError: A GPU has no memory to pack a strided array.
        DistBackendError: CUDA failed.
        TypeError: NumPy has no dtype for an array.
    """
    return tree_map(leaving, values)
