"""A stream of a way's own, and how it takes turns with those of the arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpidist.cuda.library import cupy, on_device
from mpidist.cuda.streams import mark, used, wait_for

if TYPE_CHECKING:
    from mpidist.cuda.device_array import DeviceArray


class OwnStream:
    """Local. A stream of a device, for the work of one way.

    Args:
        number: Of the device.

    Attributes:
        number: The same.
        stream: CuPy's.

    Raises:
        FailedPreconditionError: There is no CuPy.
        DistBackendError: There is no such device.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        with on_device(number, "making a stream") as package:
            self.stream: Any = package.cuda.Stream(non_blocking=True)

    @contextmanager
    def behind(self, arrays: Sequence[DeviceArray]) -> Iterator[None]:
        """Local. Have it wait for the arrays' streams, make it current, and have them wait for it.

        The host waits for nothing. Its device must be current. Should the block fail the streams
        wait all the same for what it has begun.
        """
        streams = {array.stream.ptr: array.stream for array in arrays}.values()
        for stream in streams:
            self.stream.wait_event(mark(stream))
        try:
            with used(self.stream):
                yield
        finally:
            event = mark(self.stream)
            for stream in streams:
                stream.wait_event(event)

    def catch_up(self, arrays: Sequence[DeviceArray], doing: str) -> None:
        """Local. Wait until the arrays' streams have done all that they have to do.

        Raises:
            CUDARuntimeError: Something of it has failed.
            DeadlineExceededError: It has not ended after ``MPIDIST_STALL_ABORT_S``.
        """
        for stream in {array.stream.ptr: array.stream for array in arrays}.values():
            wait_for(mark(stream), doing)

    def finish(self, doing: str) -> None:
        """Local. Wait until it has done all that it has to do; raises as :meth:`catch_up`."""
        wait_for(mark(self.stream), doing)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Local. Begin a copy between addresses of devices, also of peers."""
        runtime = cupy().cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(target, source, nbytes, kind, self.stream.ptr)
