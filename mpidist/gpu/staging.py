"""Copies between the host and devices, through pinned host memory.

A :class:`HostStaging` array stands for a whole array on a device. :class:`Upload`,
:class:`Download` and :class:`Prefetcher` copy on streams of their own, so that copies overlap
kernels.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.gpu import pinned_pool
from mpidist.gpu.cupy_api import check_dtype, cupy, on_device
from mpidist.gpu.device_array import DeviceArray
from mpidist.gpu.pinned_pool import Block, start_copy
from mpidist.gpu.streams import (
    current_stream,
    is_done,
    new_stream,
    record_event,
    use_stream,
    wait_for,
)

Array = NDArray[Any]


class HostStaging(np.ndarray[Any, Any]):
    """Pinned host memory that stands for an array on a device; made by :func:`stage`.

    Attributes:
        origin: The array on the device; None for views of the staging array.
    """

    origin: DeviceArray | None = None
    _block: Block

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        # Results of computations are ordinary arrays.
        return array[()] if return_scalar else array

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)

    def upload(self) -> None:
        """Copy the values to the device, behind the work on the array's stream."""
        if self.origin is not None:
            self.origin.upload(self._block)


def stage(array: Any, *, read: bool = True) -> HostStaging:
    """Return host memory for an array on a device.

    Args:
        array: See :class:`DeviceArray`.
        read: Whether to copy the values, behind the work on the array's stream, and wait.

    Returns:
        A C-contiguous array of the same shape and dtype, read-only if the array is.
        :meth:`HostStaging.upload` copies its values to the device.

    Raises:
        FailedPreconditionError: There is no CuPy.
        TypeError: See :class:`DeviceArray`.
        ValueError: See :class:`DeviceArray`.
        ResourceExhaustedError: The host lacks memory, or the device to pack a strided array.
        DistBackendError: CUDA failed.
    """
    origin = DeviceArray(array)
    with on_device(origin.device, "copying %s to the host", origin):
        staging, block = pinned_pool.pool.array(origin.shape, origin.dtype, HostStaging)
        staging.origin, staging._block = origin, block
        if read and origin.nbytes:
            origin.start_download(block, origin.stream)
            wait_for(block.event, "copying %s to the host", origin)
            block.event = None
    if not origin.writeable:
        staging.flags.writeable = False
    return staging


def layout_of(array: Array) -> Array:
    """Return an array that tells the place in memory: for a staging array, that on the device."""
    origin = array.origin if isinstance(array, HostStaging) else None
    return array if origin is None else origin.header


class Upload:
    """Pinned memory to fill, and a new array on a device that receives the values.

    The copy does not wait for work that the current stream has queued. So of two pulls in turn the
    second is copied while the device computes with the first.

    Args:
        device: Device index.
        shape: Shape of the array.
        dtype: Dtype of the array, which CuPy has, in the byte order of the machine.

    Attributes:
        host: The ndarray to fill, not initialized; gone when the copy has started.

    Raises:
        ResourceExhaustedError: The device has no memory.
        DistBackendError: CUDA failed.
    """

    def __init__(self, device: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self._device, self._shape, self._dtype = device, tuple(shape), dtype
        self._event: Any = None
        with on_device(device, "an array of %s%s", dtype, list(shape)):
            self._memory = _UploadMemory(device, max(math.prod(shape) * dtype.itemsize, 1))
            self.host: Array
            self.host, self._pinned = pinned_pool.pool.array(shape, dtype, np.ndarray)

    def start(self) -> Any:
        """Start to copy. The current stream of this thread waits for the copy, the host does not.

        Returns:
            The CuPy array. Its memory is used again when the array and all views are gone, behind
            the work that is on the current stream by then.

        Raises:
            DistBackendError: CUDA failed.
        """
        self.copy()
        return self.take()

    def copy(self) -> None:
        """Start to copy; :meth:`take` comes later, perhaps on another thread."""
        nbytes, memory, pinned = self.host.nbytes, self._memory, self._pinned
        if nbytes:
            operation = "copying an array of %s%s to it"
            with on_device(self._device, operation, self._dtype, list(self._shape)):
                places = memory.address, pinned.address, nbytes
                self._event = start_copy(*places, "memcpyHostToDevice", memory.stream, pinned)
        del self.host, self._pinned

    def take(self) -> Any:
        """Return the CuPy array; see :meth:`start`."""
        memory = self._memory
        with on_device(self._device, "waiting for an array") as package:
            memory.user = current_stream(self._device)
            if self._event is not None:
                memory.user.wait_event(self._event)
            cuda = package.cuda
            unowned = cuda.UnownedMemory(memory.address, memory.nbytes, memory, self._device)
            return package.ndarray(self._shape, self._dtype, cuda.MemoryPointer(unowned, 0))


class _UploadMemory:
    """Memory on the current device for an upload; lives as long as the array and its views.

    CuPy's pool returns memory to the stream on which it was allocated, here that of all uploads.
    The memory of an array that is gone goes there when the array's user has ended its work. If much
    memory waits for that, the stream waits in its place, so that a host that runs ahead does not
    fill the device.

    Args:
        device: Index of that device.
        nbytes: Size.

    Attributes:
        stream: The stream of all uploads to the device.
        nbytes: Size.
        address: Address of the first byte.
        user: The stream on which the array is used, or None.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        self.user: Any = None
        self.stream = copy_stream(device, "up")
        self.nbytes = nbytes
        self._device = device
        self._waiting = _waiting.setdefault(device, deque())
        return_memory(device)
        with use_stream(self.stream):
            self._pointer = cupy().cuda.alloc(nbytes)
        self.address = int(self._pointer.ptr)

    def __del__(self) -> None:
        if self.user is None or sys.is_finalizing():  # at exit CUDA may be gone
            return
        try:
            with on_device(self._device, "releasing memory"):
                event = record_event(self.user)
        except BaseException:  # the user's stream may still use the memory
            _unusable.append(self._pointer)
        else:  # no lock: the garbage collector may run this on any thread
            self._waiting.append((event, self.nbytes, self._pointer))


WAITING_BYTES = 512 << 20
_waiting: dict[int, deque[tuple[Any, int, Any]]] = {}  # event, size and memory, by device
_returning = threading.RLock()  # a signal handler may upload, too
_unusable: list[Any] = []


def return_memory(device: int) -> None:
    """Return memory of uploads that is not used any more to CuPy's pool, the earliest first.

    Args:
        device: Index of the current device.
    """
    with _returning:
        waiting = _waiting.get(device)
        while waiting:
            event = waiting[0][0]
            if not is_done(event):
                if sum(nbytes for _, nbytes, _ in list(waiting)) <= WAITING_BYTES:
                    return
                copy_stream(device, "up").wait_event(event)
            waiting.popleft()


class Prefetcher:
    """Copies host arrays to a device ahead of their use.

    Args:
        device: Device index.

    Attributes:
        device: Device index.

    Raises:
        FailedPreconditionError: There is no CuPy.
        DistBackendError: There is no such device.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        with on_device(device, "making a stream"):
            copy_stream(device, "up")

    def send(self, arrays: Sequence[Array]) -> PrefetchBatch:
        """Start to copy arrays. The caller may change them once the call returns.

        Args:
            arrays: Numbers or bools, any strides.

        Raises:
            TypeError: CuPy does not have the dtype of an array.
            ResourceExhaustedError: The device has no memory.
            DistBackendError: CUDA failed.
        """
        for array in arrays:
            check_dtype(array.dtype)
        uploads = []
        for array in arrays:
            upload = Upload(self.device, array.shape, array.dtype.newbyteorder("="))
            np.copyto(upload.host, array)
            upload.copy()
            uploads.append(upload)
        return PrefetchBatch(uploads)


class PrefetchBatch:
    """Arrays that are being copied to a device; made by :meth:`Prefetcher.send`.

    Args:
        uploads: The uploads, which have started.
    """

    def __init__(self, uploads: Sequence[Upload]) -> None:
        self._uploads = uploads

    def hand_over(self) -> list[Any]:
        """Return the arrays. The current stream of this thread waits for them, not the host.

        The memory is used again when the arrays and all views are gone, behind the work that is on
        that stream by then.
        """
        uploads, self._uploads = self._uploads, []
        return [upload.take() for upload in uploads]


class Download:
    """An array on a device that is being copied to pinned host memory.

    The copy comes behind the work on the array's stream and does not wait for later work there. Do
    not change the array before :meth:`result` has returned. Only a strided array occupies its own
    stream, which packs it.

    Args:
        array: See :class:`DeviceArray`.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array.

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
        with on_device(origin.device, "copying %s to the host", origin):
            self._host, self._block = pinned_pool.pool.array(self.shape, self.dtype, np.ndarray)
            if origin.nbytes:
                origin.start_download(self._block, copy_stream(origin.device, "down"))
        # CuPy's pool could lend the memory again before it has been copied.
        self._origin: DeviceArray | None = origin

    def result(self) -> Array:
        """Return the values in host memory. Waits for the copy, on any thread.

        Raises:
            DistBackendError: CUDA failed.
            DeadlineExceededError: A kernel before the copy does not end; see
                ``MPIDIST_STALL_ABORT_S``.
        """
        origin = self._origin
        if origin is not None:
            if origin.nbytes:
                with on_device(origin.device, "copying %s to the host", origin):
                    wait_for(self._block.event, "copying %s to the host", origin)
            self._origin = None
        return self._host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.result(), dtype, copy=copy)


_streams: dict[tuple[int, str], Any] = {}
_creating = threading.Lock()


def copy_stream(device: int, direction: str) -> Any:
    """Return the stream of a device for all uploads or all downloads.

    Devices have a copy engine for each direction, so both run at the same time.

    Args:
        device: Device index.
        direction: ``"up"`` or ``"down"``.
    """
    with _creating:
        if (device, direction) not in _streams:
            _streams[device, direction] = new_stream(device)
        return _streams[device, direction]
