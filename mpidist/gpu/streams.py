"""Streams and events of CUDA."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mpidist.config import config
from mpidist.errors import DeadlineExceededError, FailedPreconditionError
from mpidist.gpu.cupy_api import cupy, on_device
from mpidist.mpi import Backoff

logger = logging.getLogger("mpidist")

_LEGACY, _PER_THREAD = 1, 2  # CUDA's handles of default streams, also in the array interface
_NOT_READY = 600  # cudaErrorNotReady


def current_stream(device: int) -> Any:
    """Return the stream on which this thread works with CuPy on a device.

    Raises:
        FailedPreconditionError: It is the per-thread default stream, whose handle means another
            stream in each thread.
    """
    return _checked(cupy().cuda.get_current_stream(device))


def stream_of(handle: int) -> Any:
    """Return the stream of another framework.

    Args:
        handle: Address of the stream, or its number in the CUDA array interface.

    Raises:
        FailedPreconditionError: See :func:`current_stream`.
    """
    cuda = cupy().cuda
    if handle in (0, _LEGACY):
        return cuda.Stream.null
    if handle == _PER_THREAD:
        return _checked(cuda.Stream.ptds)
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_ExternalStream(handle))
    return cuda.ExternalStream(handle)


def new_stream(device: int) -> Any:
    """Return a stream of a device, which the default stream does not wait for.

    Raises:
        DistBackendError: There is no such device.
        FailedPreconditionError: There is no CuPy.
    """
    with on_device(device, "making a stream") as package:
        return package.cuda.Stream(non_blocking=True)


@contextmanager
def use_stream(stream: Any) -> Iterator[None]:
    """Make a stream of the current device the one on which this thread works with CuPy.

    CuPy's own ``with`` would forget a stream that was made current by ``use()``.
    """
    before = cupy().cuda.get_current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()


def record_event(stream: Any) -> Any:
    """Return an event behind the work that is queued on a stream of the current device."""
    event = cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def is_done(event: Any) -> bool:
    """Return whether the work before an event has ended.

    Raises:
        CUDARuntimeError: The work has failed. CuPy's ``event.done`` stays False then.
    """
    runtime = cupy().cuda.runtime
    status = runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return bool(status == 0)


def wait_for(event: Any, operation: str, *args: object) -> None:
    """Wait for an event. Log a warning after ``MPIDIST_STALL_S``: a kernel may never end.

    Args:
        event: The event.
        operation: The waiting operation, for messages, with ``%s`` for each of the ``args``.
        args: Objects to format.

    Raises:
        CUDARuntimeError: See :func:`is_done`.
        DeadlineExceededError: The event is not done after ``MPIDIST_STALL_ABORT_S``.
    """
    if is_done(event):
        return
    backoff, started, warned = Backoff(spins=1000, longest_s=1e-4), time.monotonic(), False
    while not is_done(event):
        backoff.pause()
        waited = time.monotonic() - started
        if waited > config.stall_s and not warned:
            warned = True
            text = operation % args if args else operation
            logger.warning("%s has waited %.0f s for the work queued before it", text, waited)
        if waited > config.stall_abort_s:
            raise DeadlineExceededError(
                f"{operation % args if args else operation} has waited {waited:.0f} s for the work "
                "queued before it: a kernel may never end (the limit is MPIDIST_STALL_ABORT_S)"
            )


def synchronize(device: int, operation: str) -> None:
    """Wait for the work that this thread has queued with CuPy on the current device.

    Args:
        device: Device index.
        operation: See :func:`wait_for`, which raises the same.
    """
    wait_for(record_event(current_stream(device)), operation)


@contextmanager
def ordered_with(stream: Any, others: Iterable[Any]) -> Iterator[None]:
    """Make a stream current in the block, ordered with the streams of arrays.

    The stream starts after the work that was queued on the others, and they wait for the stream,
    also if the block fails. The host does not wait. The device must be current.

    Args:
        stream: The stream of a group.
        others: CuPy's streams of the arrays.
    """
    others = {other.ptr: other for other in others}.values()
    for other in others:
        stream.wait_event(record_event(other))
    try:
        with use_stream(stream):
            yield
    finally:
        event = record_event(stream)
        for other in others:
            other.wait_event(event)


class _ExternalStream:
    """The protocol by which CuPy takes a stream of another framework."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _checked(stream: Any) -> Any:
    if stream.ptr == _PER_THREAD:
        raise FailedPreconditionError(
            "the per-thread default stream has no handle that other threads could use: work on "
            "cupy.cuda.Stream(non_blocking=True), and leave "
            "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM unset"
        )
    return stream
