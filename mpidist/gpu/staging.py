"""Copies between the host and devices, through pinned host memory.

A :class:`HostStaging` array stands for a whole array on a device. :class:`Upload`,
:class:`Download` and :class:`Prefetcher` copy on streams of their own, so that copies overlap
kernels. A :class:`StagingStream` keeps its memory for a long series of steps.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.gpu.cupy_api import check_dtype, cupy, on_device
from mpidist.gpu.device_array import DeviceArray
from mpidist.gpu.memory_pool import (
    UNTRACKED,
    Block,
    Bytes,
    device_pool,
    pinned_array,
    pinned_pool,
    size_class,
    start_copy,
)
from mpidist.gpu.persistent import allocate_persistent
from mpidist.gpu.streams import current_stream, record_event, use_stream, wait_for

Array = NDArray[Any]

_BYTE = np.dtype(np.uint8)
_CHUNK_BYTES = 32 << 20  # pinned at a time: the host fills a chunk while the device copies another
_ALIGNMENT = 256  # of arrays that lie behind each other on the device


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
    origin, staging = DeviceArray(array), None
    try:
        with on_device(origin.device, "copying %s to the host", origin):
            staging, block = pinned_array(pinned_pool(), origin.shape, origin.dtype, HostStaging)
            staging.origin, staging._block = origin, block
            if read and origin.nbytes:
                origin.start_download(block, origin.stream)
                wait_for(block.event, "copying %s to the host", origin)
                block.event = None
    except BaseException as error:
        # A caller that keeps the error must not keep the memory, which these frames hold.
        traceback.clear_frames(error.__traceback__)
        del staging
        raise
    if not origin.writeable:
        staging.flags.writeable = False
    return staging


def layout_of(array: Array) -> Array:
    """Return an array that tells the place in memory: for a staging array, that on the device."""
    origin = array.origin if isinstance(array, HostStaging) else None
    return array if origin is None else origin.header


class PrefetchBatch:
    """Arrays that are being copied to a device; made by :meth:`Prefetcher.send`.

    Args:
        device: Device index.
        arrays: CuPy arrays.
        blocks: The memory of the arrays.
        event: CUDA's event behind the copies.
    """

    def __init__(
        self, device: int, arrays: Sequence[Any], blocks: Sequence[Block], event: Any
    ) -> None:
        self._device = device
        self._arrays = list(arrays)
        self._blocks = blocks
        self._event = event

    def hand_over(self) -> list[Any]:
        """Return the arrays. The current stream of this thread waits for them, not the host.

        The memory is used again when the arrays and all views are gone, behind the work that is on
        that stream by then.
        """
        with on_device(self._device, "waiting for prefetched arrays"):
            stream = current_stream(self._device)
            stream.wait_event(self._event)
        for block in self._blocks:
            block.stream = stream
        arrays, self._arrays = self._arrays, []
        return arrays


class Prefetcher:
    """Copies host arrays to a device ahead of their use, on a stream of its own.

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
        with on_device(device, "making a stream") as package:
            self._stream = package.cuda.Stream(non_blocking=True)

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
        total = sum(array.nbytes for array in arrays)
        # A caller that keeps an error keeps this frame. So only ended frames hold the memory.
        with on_device(self.device, "sending %d bytes to it", total):
            return self._start(arrays)

    def _start(self, arrays: Sequence[Array]) -> PrefetchBatch:
        new = [_new_array(self.device, array.shape, array.dtype) for array in arrays]
        blocks = [block for _, block in new]

        def start() -> Any:
            event = None
            for array, block in zip(arrays, blocks, strict=True):
                event = self._copy(array, block) or event
            return event

        event = _write_blocks(self._stream, blocks, start)
        return PrefetchBatch(self.device, [target for target, _ in new], blocks, event)

    def _copy(self, array: Array, block: Block) -> Any:
        native = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        source, event = native.reshape(-1).view(np.uint8), None
        for first in range(0, source.nbytes, _CHUNK_BYTES):
            part = source[first : first + _CHUNK_BYTES]
            chunk, pinned = pinned_array(pinned_pool(), part.shape, _BYTE, np.ndarray)
            np.copyto(chunk, part)
            target, kind = block.address + first, "memcpyHostToDevice"
            event = start_copy(target, pinned.address, part.nbytes, kind, self._stream, pinned)
        return event


class Upload:
    """Pinned memory to fill, and a new array on a device that receives the values.

    The array does not come from CuPy's pool: its memory may still be in use on the caller's stream,
    and the copy would have to wait. It lies in a block whose last user has left an event, and the
    copy waits for that alone. So of two pulls in turn the second is copied while the device
    computes with the first.

    Args:
        device: Device index.
        shape: Shape of the array.
        dtype: Dtype of the array, which CuPy has, in the byte order of the machine.

    Attributes:
        host: The ndarray to fill; not initialized.

    Raises:
        ResourceExhaustedError: The device has no memory.
        DistBackendError: CUDA failed.
    """

    def __init__(self, device: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self._device = device
        with on_device(device, "an array of %s%s", dtype, list(shape)):
            self._target, self._block = _new_array(device, shape, dtype)
            self.host: Array
            self.host, self._pinned = pinned_array(pinned_pool(), shape, dtype, np.ndarray)

    def start(self) -> Any:
        """Start to copy. The current stream of this thread waits for the copy, the host does not.

        Returns:
            The CuPy array. Its memory is used again when the array and all views are gone, behind
            the work that is on the current stream by then.

        Raises:
            DistBackendError: CUDA failed.
        """
        block, pinned, host = self._block, self._pinned, self.host
        operation = "copying an array of %s%s to it"
        with on_device(self._device, operation, host.dtype, list(host.shape)):
            user = current_stream(self._device)
            if host.nbytes:
                stream, kind = copy_stream(self._device, "up"), "memcpyHostToDevice"
                source, nbytes = pinned.address, host.nbytes

                def start() -> Any:
                    return start_copy(block.address, source, nbytes, kind, stream, pinned)

                user.wait_event(_write_blocks(stream, [block], start))
        block.stream = user
        target, self._target = self._target, None
        return target


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
            self._host, self._block = _start_download(origin)
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


class StagingStream:
    """A stream with memory on its device and pinned memory, for one step after another.

    A step that has started is over when :meth:`finish` returns. With several staging streams, the
    copies of one step overlap the kernels of others.

    Args:
        device: Device index. The device must be current in all calls.

    Raises:
        DistBackendError: CUDA failed.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        with on_device(device, "making a stream") as package:
            self._stream = package.cuda.Stream(non_blocking=True)
        self._pinned: dict[str, tuple[Bytes, Block]] = {}  # by direction
        self._memory: Any = None  # on the device
        self._fetched: Bytes | None = None
        self._step = ""  # the step that has started and not ended

    @contextmanager
    def working(self, step: str) -> Iterator[Any]:
        """Start a step in the block, after the previous step has ended.

        If the block fails, the step has ended by then.

        Args:
            step: Text for messages.

        Yields:
            CuPy.

        Raises:
            ResourceExhaustedError: The device has no memory.
            DistBackendError: CUDA failed.
        """
        self.finish()
        with on_device(self._device, step) as package:
            self._step = step
            try:
                yield package
            except BaseException:
                self.finish()
                raise

    def current(self) -> AbstractContextManager[None]:
        """Make the stream current for CuPy in the block."""
        return use_stream(self._stream)

    def place(self, *arrays: Array, room: int = 0) -> list[Any]:
        """Start to copy arrays to the memory on the device. The arrays may be changed at once.

        Args:
            arrays: C-contiguous host arrays.
            room: Further bytes to reserve there, not initialized.

        Returns:
            CuPy's pointers to each array, and to the room.
        """
        starts = _starts(arrays)
        nbytes = starts[-1]
        self._reserve(nbytes + room)
        if nbytes:
            staged, block = self._staging("up", nbytes)
            for array, start in zip(arrays, starts, strict=False):
                flat = array.reshape(-1).view(np.uint8)
                np.copyto(staged[start : start + flat.nbytes], flat)
            self._copy(self._memory.data.ptr, block.address, nbytes, "memcpyHostToDevice")
        memory = self._memory.data.mem
        return [cupy().cuda.MemoryPointer(memory, start) for start in starts]

    def reserve(self, *arrays: Array) -> None:
        """Allocate the memory that :meth:`place` needs for arrays of these sizes.

        Raises:
            ResourceExhaustedError: The device has no memory.
        """
        with self.working("the next step"):
            nbytes = _starts(arrays)[-1]
            self._reserve(nbytes)
            self._staging("up", nbytes)

    def upload(self, address: int, source: Bytes, *, pinned: bool) -> None:
        """Start to copy from the host to an address on the device.

        Args:
            address: Address on the device.
            source: Flat host memory.
            pinned: Whether the memory is pinned and stays unchanged until the step ends; otherwise
                it is copied to pinned memory first.
        """
        if source.nbytes:
            start = source.ctypes.data
            if not pinned:
                staged, block = self._staging("up", source.nbytes)
                np.copyto(staged, source)
                start = block.address
            self._copy(address, start, source.nbytes, "memcpyHostToDevice")

    def download(self, address: int, target: Bytes) -> None:
        """Start to copy from an address on the device to pinned host memory, flat."""
        if target.nbytes:
            self._copy(target.ctypes.data, address, target.nbytes, "memcpyDeviceToHost")

    def fetch(self, address: int, nbytes: int) -> None:
        """Start to copy from an address on the device to the memory that :meth:`finish` returns."""
        self._fetched, _ = self._staging("down", nbytes)
        self.download(address, self._fetched)

    def finish(self) -> Bytes:
        """Wait until the step has ended.

        Returns:
            The fetched bytes; valid until the next :meth:`fetch`.

        Raises:
            DistBackendError: CUDA failed.
            DeadlineExceededError: The step has not ended after ``MPIDIST_STALL_ABORT_S``.
        """
        if self._step:
            with on_device(self._device, self._step):
                wait_for(record_event(self._stream), "%s on GPU %d", self._step, self._device)
            self._step = ""
            for _, block in self._pinned.values():
                block.event = None
        fetched, self._fetched = self._fetched, None
        return _NOTHING if fetched is None else fetched

    def _reserve(self, nbytes: int) -> None:
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None
            owner = f"memory for {self._step}"
            self._memory = allocate_persistent(self._device, size_class(nbytes), _BYTE, owner)

    def _staging(self, direction: str, nbytes: int) -> tuple[Bytes, Block]:
        if direction not in self._pinned or self._pinned[direction][0].nbytes < nbytes:
            self._pinned.pop(direction, None)
            shape = (size_class(nbytes),)
            self._pinned[direction] = pinned_array(pinned_pool(), shape, _BYTE, np.ndarray)
        memory, block = self._pinned[direction]
        return memory[:nbytes], block

    def _copy(self, target: int, source: int, nbytes: int, kind: str) -> None:
        for _, block in self._pinned.values():
            block.event = UNTRACKED  # finish() ends the use
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, getattr(runtime, kind), self._stream.ptr)


_NOTHING: Bytes = np.empty(0, np.uint8)
_streams: dict[tuple[int, str], Any] = {}
_creating = threading.Lock()


def copy_stream(device: int, direction: str) -> Any:
    """Return the stream of the current device for all uploads or all downloads.

    Devices have a copy engine for each direction, so both run at the same time.

    Args:
        device: Device index.
        direction: ``"up"`` or ``"down"``.
    """
    with _creating:
        if (device, direction) not in _streams:
            _streams[device, direction] = cupy().cuda.Stream(non_blocking=True)
        return _streams[device, direction]


def _start_download(origin: DeviceArray) -> tuple[Array, Block]:
    host, block = pinned_array(pinned_pool(), origin.shape, origin.dtype, np.ndarray)
    if origin.nbytes:
        origin.start_download(block, copy_stream(origin.device, "down"))
    return host, block


class _Holder:
    """Lives as long as an array on a device and its views, and the block is lent to it."""


def _new_array(device: int, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Block]:
    """Return a CuPy array, not initialized, in a block of memory of the current device."""
    package, pool = cupy(), device_pool(device)
    dtype = dtype.newbyteorder("=")
    cuda, block, holder = package.cuda, pool.take(math.prod(shape) * dtype.itemsize), _Holder()
    memory = cuda.UnownedMemory(block.address, block.nbytes, holder, device)
    pool.lend(holder, block)
    return package.ndarray(tuple(shape), dtype, cuda.MemoryPointer(memory, 0)), block


def _write_blocks(stream: Any, blocks: Sequence[Block], start: Callable[[], Any]) -> Any:
    """Copy into blocks of a device, behind their last uses. Return the event behind the copies.

    Args:
        stream: The stream that copies.
        blocks: The blocks, which receive the event.
        start: Starts the copies; returns the event behind the last copy, or None.
    """
    for block in blocks:
        if block.event is not None:
            stream.wait_event(block.event)
        block.event = UNTRACKED
    event = None
    try:
        event = start()
    finally:
        # After an error, earlier copies may still write to the blocks.
        event = record_event(stream) if event is None else event
        for block in blocks:
            block.event = event
    return event


def _starts(arrays: Sequence[Array]) -> list[int]:
    """Return the offsets of arrays that lie behind each other, and the end of the last one."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
