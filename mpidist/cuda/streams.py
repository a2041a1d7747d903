"""Streams and events of CUDA: whose stream it is, and whether it has come to an event."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mpidist.config import config
from mpidist.cuda.library import cupy, on_device
from mpidist.errors import DeadlineExceededError, FailedPreconditionError
from mpidist.runtime import Backoff

logger = logging.getLogger("mpidist")

_LEGACY, _PER_THREAD = 1, 2  # streams by number, for CUDA and in the array interface
_NOT_READY = 600  # cudaErrorNotReady


def current_stream(device: int) -> Any:
    """Local. The stream on which this thread works with CuPy on a device.

    Raises:
        FailedPreconditionError: It is the default stream of the thread, by a name that in another
            thread is that one's.
    """
    return _nameable(cupy().cuda.get_current_stream(device))


def stream_of(number: int) -> Any:
    """Local. The stream of another framework, by its address or by the interface's number.

    Raises:
        FailedPreconditionError: As :func:`current_stream`.
    """
    cuda = cupy().cuda
    if number in (0, _LEGACY):
        return cuda.Stream.null
    if number == _PER_THREAD:
        return _nameable(cuda.Stream.ptds)
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_Address(number))
    return cuda.ExternalStream(number)


@contextmanager
def used(stream: Any) -> Iterator[None]:
    """Local. Make a stream of the current device the one on which this thread works with CuPy.

    CuPy's own ``with`` would forget a stream that was made current by ``use()``.
    """
    before = cupy().cuda.get_current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()


def mark(stream: Any) -> Any:
    """Local. An event behind what a stream of the current device has to do."""
    event = cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def has_come(event: Any) -> bool:
    """Local. Whether an event has come.

    Raises:
        CUDARuntimeError: It never will, since something before it has failed; CuPy's own
            ``event.done`` is False for ever then.
    """
    runtime = cupy().cuda.runtime
    status = runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return bool(status == 0)


def wait_for(event: Any, doing: str) -> None:
    """Local. Wait for an event; told after ``MPIDIST_STALL_S``, for a kernel may never end.

    Args:
        event: Which.
        doing: What waits, for the message.

    Raises:
        CUDARuntimeError: See :func:`has_come`.
        DeadlineExceededError: It has not come after ``MPIDIST_STALL_ABORT_S``.
    """
    backoff, begun, told = Backoff(spins=1000, longest_s=1e-4), time.monotonic(), False
    while not has_come(event):
        backoff.pause()
        waited = time.monotonic() - begun
        if waited > config.stall_s and not told:
            told = True
            logger.warning("%s has waited %.0f s for what was queued before it", doing, waited)
        if waited > config.stall_abort_s:
            raise DeadlineExceededError(
                f"{doing} has waited {waited:.0f} s for what was queued before it: a kernel may "
                "never end (MPIDIST_STALL_ABORT_S says how long to wait)"
            )


def finish(number: int, doing: str) -> None:
    """Local. Wait until this thread's stream on the current device has done what it has to do.

    Args:
        number: Of the device.
        doing: See :func:`wait_for`, which raises the same.
    """
    wait_for(mark(current_stream(number)), doing)


class CommStream:
    """A stream for the copies, kernels and NCCL calls of one group.

    Args:
        device: Index of the GPU.

    Attributes:
        device: Index of the GPU.
        stream: CuPy's stream.

    Raises:
        DistBackendError: There is no such device.
        FailedPreconditionError: There is no CuPy.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        with on_device(device, "making a stream") as package:
            self.stream: Any = package.cuda.Stream(non_blocking=True)

    @contextmanager
    def ordered_with(self, streams: Iterable[Any]) -> Iterator[None]:
        """Make the stream current in the block, ordered with the streams of arrays.

        The stream starts after the work that was queued on the others, and they wait for the
        stream, also if the block fails. The host does not wait. The device must be current.

        Args:
            streams: CuPy's streams of the arrays.
        """
        others = {stream.ptr: stream for stream in streams}.values()
        for stream in others:
            self.stream.wait_event(mark(stream))
        try:
            with used(self.stream):
                yield
        finally:
            event = mark(self.stream)
            for stream in others:
                stream.wait_event(event)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy between addresses of devices, peers included."""
        runtime = cupy().cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(target, source, nbytes, kind, self.stream.ptr)


class _Address:
    def __init__(self, number: int) -> None:
        self._number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._number


def _nameable(stream: Any) -> Any:
    if stream.ptr == _PER_THREAD:
        raise FailedPreconditionError(
            "the default stream of a thread has no name that other threads could use: work on "
            "cupy.cuda.Stream(non_blocking=True), and leave "
            "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM unset"
        )
    return stream
