"""Memory that a server keeps: arrays on a device, pinned pages, and streams that copy in steps."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.gpu import pinned_pool
from mpidist.gpu.cupy_api import cuda_errors, cupy, is_out_of_memory, on_device
from mpidist.gpu.pinned_pool import UNTRACKED, Block, Bytes, size_class
from mpidist.gpu.staging import return_memory
from mpidist.gpu.streams import logger, new_stream, record_event, use_stream, wait_for

Array = NDArray[Any]

_BYTE = np.dtype(np.uint8)
_NOTHING: Bytes = np.empty(0, np.uint8)
_ALIGNMENT = 256  # of arrays that lie behind each other on the device
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process
_warned: list[str] = []


def allocate_persistent(device: int, size: int, dtype: np.dtype[Any], owner: str) -> Any:
    """Return a flat CuPy array, not initialized, whose memory the device gets back at its end.

    CuPy's pool would keep the memory for this process.

    Args:
        device: Device index.
        size: Number of elements.
        dtype: A dtype that CuPy has.
        owner: The owner, for messages: ``"variable 'w'"``.

    Raises:
        ResourceExhaustedError: The device has no memory.
        DistBackendError: CUDA failed.
    """
    nbytes = size * dtype.itemsize
    with on_device(device, "%d bytes of %s", nbytes, owner) as package:
        try:
            memory = package.cuda.Memory(max(nbytes, 1))
        except cuda_errors() as error:
            if not is_out_of_memory(error):
                raise
            return_memory(device)
            package.get_default_memory_pool().free_all_blocks()
            memory = package.cuda.Memory(max(nbytes, 1))
        return package.ndarray((size,), dtype, package.cuda.MemoryPointer(memory, 0))


class Pinned:
    """Host memory that is pinned in place until :meth:`close`; made by :func:`pin`."""

    def __init__(self, memory: Bytes) -> None:
        self._memory: Bytes | None = memory

    def close(self) -> None:
        """Unpin the memory. No device may use it. A second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            # A device that is lost has released the memory already.
            with suppress(*cuda_errors()):
                cupy().cuda.runtime.hostUnregister(memory.ctypes.data)


def pin(memory: Bytes, device: int) -> Pinned | None:
    """Pin host memory in place, so that a device copies straight from and to it.

    Args:
        memory: Whole pages that exist, none of which is pinned.
        device: Device index.

    Returns:
        A handle that unpins the memory; None, after one warning, if the system refuses.
    """
    address = memory.ctypes.data
    if address % mmap.PAGESIZE or memory.nbytes % mmap.PAGESIZE or not memory.nbytes:
        raise ValueError(f"{memory.nbytes} bytes at {address:#x} are no whole pages")
    with on_device(device, "pinning memory") as package:
        try:
            package.cuda.runtime.hostRegister(address, memory.nbytes, _PORTABLE)
        except cuda_errors() as error:
            if not _warned:
                _warned.append(str(error))
                logger.warning(
                    "host memory cannot be pinned in place (%s): copies to and from GPU %d go "
                    "through a staging buffer, and take a little longer; see the limits that "
                    "containers and batch systems set (ulimit -l)",
                    error,
                    device,
                )
            return None
    return Pinned(memory)


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
        self._stream = new_stream(device)
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
            self._pinned[direction] = pinned_pool.pool.array(shape, _BYTE, np.ndarray)
        memory, block = self._pinned[direction]
        return memory[:nbytes], block

    def _copy(self, target: int, source: int, nbytes: int, kind: str) -> None:
        for _, block in self._pinned.values():
            block.event = UNTRACKED  # finish() ends the use
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, getattr(runtime, kind), self._stream.ptr)


def _starts(arrays: Sequence[Array]) -> list[int]:
    """Return the offsets of arrays that lie behind each other, and the end of the last one."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
