"""GPUs of replicas: which they are, and how values get there and back."""

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
from strategy.array_like import is_on_gpu, on_host
from strategy.shared.host import Task
from strategy.slices import IndexedSlices

Array = NDArray[Any]
Handed = tuple[int, Any]
"""A GPU, and an event of its."""


def chosen_gpus(
    wanted: int, replicas: int, spec: ClusterSpec, workers: Sequence[Task], me: Task
) -> tuple[int, ...]:
    """Local. The GPU of each replica of a worker, by CuPy's numbers; none if none are wanted.

    The workers of a host, which all may see all of its GPUs, take them in turn.

    Args:
        wanted: GPUs of each worker.
        replicas: Replicas of each worker.
        spec: The cluster.
        workers: Its workers.
        me: Which of them this is.

    Raises:
        FailedPreconditionError: CuPy cannot be imported, or can use no GPU.
        ValueError: This process sees fewer, or there are fewer replicas than GPUs.
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
    """Local. An array of the host as one on a GPU, if there is one."""
    if gpu is None:
        return array
    return pulled(
        "an array", array.shape, array.dtype, None, gpu, lambda view: np.copyto(view, array)
    )


def brought_like(value: Any, like: Any, gpu: int | None) -> Any:
    """Local. A value where another one lies: on a GPU if that does, rows too."""
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
    """Local. Pull into an array, wherever it lies.

    Args:
        whose: For messages: ``"variable 'w'"``.
        shape: Of what is pulled.
        dtype: Of what is pulled.
        out: Where it shall lie; None for a fresh array.
        gpu: Where a fresh array shall lie; None for the host.
        pull: Fills an array of the host.

    Returns:
        The array; on a GPU the stream of who takes it waits until it is filled.

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
    """Local. Memory of the host to pull into, and what brings that to where it shall lie.

    A fresh array on a GPU is filled beside what the current stream has to do, a given one behind.

    Args:
        whose: See :func:`pulled`, which raises the same; so are the others.
        shape: Of what is pulled.
        dtype: Of what is pulled.
        out: Where it shall lie; None for a fresh array.
        gpu: Where a fresh array shall lie.

    Returns:
        The memory, and a function to be called once it has been filled, which gives the array.
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
    """Local. What lies on a GPU, rows too, on its way to the host; others as they are.

    Raises:
        ResourceExhaustedError: The GPU has no memory to pack it.
        DistBackendError: CUDA failed.
    """
    if isinstance(value, IndexedSlices):
        return IndexedSlices(leaving(value.values), leaving(value.indices))
    return Download(value) if is_on_gpu(value) else value


def handed_over(gpu: int | None) -> Handed | None:
    """Local. What others have to wait for that go on with what this thread has made on its GPU."""
    if gpu is None:
        return None
    with on_device(gpu, "handing over what a replica has made"):
        return gpu, record_event(current_stream(gpu))


def go_behind(events: Iterable[Handed | None]) -> None:
    """Local. Let what this thread does on GPUs from now on wait for what others have made there."""
    for handed in filter(None, events):
        with on_device(handed[0], "going on with what a replica has made"):
            _wait_for([handed], current_stream(handed[0]))


def _wait_for(events: Iterable[Handed | None], stream: Any) -> None:
    """Let a stream of the current device wait: the default stream is that of whichever it is."""
    for _, event in filter(None, events):
        stream.wait_event(event)


def usable_elsewhere(value: Any) -> Any:
    """Local. A value as another thread may use it, behind the event that it is handed over with.

    CuPy's arrays stay on their GPU. Of those of other packages only this thread knows the stream:
    they come to the host; and so do rows.
    """
    if isinstance(value, IndexedSlices):
        return IndexedSlices(on_host(value.values), on_host(value.indices))
    return value if _is_of_cupy(value) else on_host(value)


def can_be_added(values: Sequence[Any]) -> bool:
    """Local. Whether :func:`added` takes these values; others are added up on the host."""
    if len(values) == 1 or not all(map(_is_of_cupy, values)):
        return False
    return len({(value.shape, value.dtype) for value in values}) == 1 and all(
        value.dtype.char in "efd" and value.flags.c_contiguous for value in values
    )


def added(arrays: Sequence[Any], dtype: np.dtype[Any], divisor: int) -> Array:
    """Local. The sum of CuPy arrays, in their order, on the GPU of the first, as a host array.

    Args:
        arrays: See :func:`can_be_added`; on any GPUs.
        dtype: In which they are added up.
        divisor: What the sum is divided by.

    Raises:
        ResourceExhaustedError: That GPU has no memory for the sum.
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
    # This waits until all has been read. The sum may be kept, and pinned memory is dear.
    return np.array(host_view(total))


def _is_of_cupy(value: Any) -> bool:
    return is_on_gpu(value) and isinstance(value, cupy().ndarray)


def _near(array: Any, gpu: int, package: Any) -> Any:
    """A CuPy array, or a copy of one of another GPU on this one, which is the current one."""
    there = int(array.device.id)
    if there == gpu:
        return array
    near = package.empty(array.shape, array.dtype)
    places = (near.data.ptr, gpu, array.data.ptr, there)
    package.cuda.runtime.memcpyPeerAsync(*places, array.nbytes, current_stream(gpu).ptr)
    return near


def _host(spec: ClusterSpec, task: Task) -> str:
    return spec.task_address(*task).rpartition(":")[0]
