"""Copies that pass by what a stream has to do: on streams of their own, in order by events."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.cuda.blocks import NEVER, Block, copy, pinned_bytes, pinned_pool
from mpidist.cuda.delivery import go_behind, place
from mpidist.cuda.device_array import DeviceArray
from mpidist.cuda.library import cupy, on_device
from mpidist.cuda.streams import current_stream, mark, wait_for

Array = NDArray[Any]


class Landing:
    """Local. Pinned memory to be filled, and a fresh array on a device that gets what is in it.

    The array is no memory of CuPy's pool: that would be what the caller's stream may still have
    use for, so that the copy had to wait for all that is queued there. It lies in a block whose
    last user has left an event, and only for that the copy waits. Of two pulls in turn the second
    so goes up while the device computes with the first.

    Args:
        number: Of the device.
        shape: Of the array.
        dtype: Of the array; CuPy has it, in this machine's byte order.

    Attributes:
        host: What is to be filled, an ndarray; not initialized.

    Raises:
        ResourceExhaustedError: The device has no memory.
        DistBackendError: CUDA failed.
    """

    def __init__(self, number: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self._number = number
        self._what = f"an array of {dtype}{list(shape)}"
        with on_device(number, self._what):
            self._target, self._block = place(number, shape, dtype)
            nbytes = math.prod(shape) * dtype.itemsize
            memory, self._pinned = pinned_bytes(pinned_pool(), nbytes)
        self.host: Array = memory.view(dtype).reshape(shape)

    def send(self) -> Any:
        """Local. Begin to copy; the current stream of this thread waits for it, the host does not.

        Returns:
            The CuPy array. Its memory is used again when it and all views of it are gone, behind
            what the stream that was current here has to do then.

        Raises:
            DistBackendError: CUDA failed.
        """
        with on_device(self._number, f"copying {self._what} to it"):
            user, block = current_stream(self._number), self._block
            if self.host.nbytes:
                self._copy(side_stream(self._number, "up"))
                user.wait_event(block.event)
        block.stream = user
        target, self._target = self._target, None
        return target

    def _copy(self, stream: Any) -> None:
        block, here, there = self._block, self.host.ctypes.data, self._target.data.ptr
        go_behind(stream, block)
        block.event = NEVER  # should there be no event behind the copy
        try:
            copy(there, here, self.host.nbytes, "memcpyHostToDevice", stream, self._pinned)
        finally:
            block.event = mark(stream)


class HostCopy:
    """Local. An array on a device, on its way to pinned memory of the host.

    The copy comes behind what the array's stream has to do when this is made, and passes by what
    is queued there later: until :meth:`result` has returned, the array must not be changed. It is
    kept until then. Only strided arrays hold their stream up, which packs them.

    Args:
        array: See :class:`DeviceArray`.

    Attributes:
        shape: Of the array.
        dtype: Of the array.

    Raises:
        FailedPreconditionError: See :class:`DeviceArray`; so are the next two.
        TypeError: See there.
        ValueError: See there.
        ResourceExhaustedError: The device has no memory to pack a strided array.
        DistBackendError: CUDA failed.
    """

    def __init__(self, array: Any) -> None:
        origin = DeviceArray(array)
        self.shape, self.dtype = origin.shape, origin.dtype
        self._number, self._doing = origin.number, f"copying {origin} to the host"
        with on_device(self._number, self._doing):
            self._host, self._block = self._begin(origin)
        # Given back to CuPy's pool, it might be written into before it has been copied.
        self._kept: DeviceArray | None = origin

    def _begin(self, origin: DeviceArray) -> tuple[Array, Block]:
        memory, block = pinned_bytes(pinned_pool(), origin.nbytes)
        host: Array = memory.view(self.dtype).reshape(self.shape)
        if host.nbytes:
            origin.begin_download(host, block, side_stream(self._number, "down"))
        return host, block

    def result(self) -> Array:
        """Local. The values, in host memory; waits for them, on any thread.

        Raises:
            DistBackendError: CUDA failed.
            DeadlineExceededError: A kernel before the copy does not end; see
                ``MPIDIST_STALL_ABORT_S``.
        """
        if self._kept is not None:
            if self._host.nbytes:
                with on_device(self._number, self._doing):
                    wait_for(self._block.event, self._doing)
            self._kept = None
        return self._host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.result(), dtype, copy=copy)


_streams: dict[tuple[int, str], Any] = {}
_making = threading.Lock()


def side_stream(number: int, way: str) -> Any:
    """Local. The stream of the current device for all such copies in one direction.

    Devices have an engine for each, and so copies up and down go on beside each other.

    Args:
        number: Of the device.
        way: ``"up"`` or ``"down"``.
    """
    with _making:
        if (number, way) not in _streams:
            _streams[number, way] = cupy().cuda.Stream(non_blocking=True)
        return _streams[number, way]
