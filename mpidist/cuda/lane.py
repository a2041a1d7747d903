"""A way to a device and back for one piece of work after the other, beside others like it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.cuda.blocks import NEVER, Block, Bytes, pinned_bytes, pinned_pool, size_class
from mpidist.cuda.lasting import lasting_array
from mpidist.cuda.library import cupy, on_device
from mpidist.cuda.streams import mark, used, wait_for

Array = NDArray[Any]

_ALIGNMENT = 256  # of what lies one behind the other on the device


class Lane:
    """Local. A stream of a device, with memory there and pinned memory of the host.

    What is begun is over when :meth:`finish` returns; then there may be another piece of work. So
    with several lanes the copies of one piece overlap the kernels of another.

    Args:
        number: Of the device, which is to be the current one of whoever uses the lane.

    Raises:
        DistBackendError: CUDA failed.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        with on_device(number, "making a stream") as package:
            self._stream = package.cuda.Stream(non_blocking=True)
        self._pinned: dict[str, tuple[Bytes, Block]] = {}  # by direction
        self._there: Any = None
        self._fetched: Bytes | None = None
        self._doing = ""  # what has begun, and not ended

    @contextmanager
    def working(self, doing: str) -> Iterator[Any]:
        """Local. In the block a piece of work begins; what the lane did before has ended.

        Should the block fail, what has begun is over when it has.

        Args:
            doing: For messages.

        Yields:
            The package.

        Raises:
            ResourceExhaustedError: The device has no memory.
            DistBackendError: CUDA failed.
        """
        self.finish()
        with on_device(self._number, doing) as package:
            self._doing = doing
            try:
                yield package
            except BaseException:  # other lanes do not wait for what has begun
                self.finish()
                raise

    def current(self) -> AbstractContextManager[None]:
        """Local. In the block, CuPy works on the lane's stream."""
        return used(self._stream)

    def place(self, *arrays: Array, room: int = 0) -> list[Any]:
        """Local. Begin to copy arrays to the lane's own memory; they may be changed at once.

        Args:
            arrays: Of the host, C-contiguous.
            room: Bytes that are wanted there besides, not initialized.

        Returns:
            Pointers of CuPy's to each, and to the room.
        """
        starts = _starts(arrays)
        nbytes = starts[-1]
        self._make_room(nbytes + room)
        if nbytes:
            staged = self._staging("up", nbytes)
            for array, start in zip(arrays, starts, strict=False):
                flat = array.reshape(-1).view(np.uint8)
                np.copyto(staged[start : start + flat.nbytes], flat)
            self._copy(self._there.data.ptr, staged.ctypes.data, nbytes, "memcpyHostToDevice")
        memory = self._there.data.mem
        return [cupy().cuda.MemoryPointer(memory, start) for start in starts]

    def reserve(self, *arrays: Array) -> None:
        """Local. Have the memory that :meth:`place` takes for arrays like these.

        Raises:
            ResourceExhaustedError: The device has no memory.
        """
        with self.working("what is to come"):
            nbytes = _starts(arrays)[-1]
            self._make_room(nbytes)
            self._staging("up", nbytes)

    def upload(self, address: int, source: Bytes, *, pinned: bool) -> None:
        """Local. Begin to copy from the host to a place on the device.

        Args:
            address: Of the place.
            source: Flat.
            pinned: Whether it is, and stays as it is until the end; otherwise it is copied first.
        """
        if source.nbytes:
            if not pinned:
                staged = self._staging("up", source.nbytes)
                np.copyto(staged, source)
                source = staged
            self._copy(address, source.ctypes.data, source.nbytes, "memcpyHostToDevice")

    def download(self, address: int, target: Bytes) -> None:
        """Local. Begin to copy from a place on the device into pinned memory, flat."""
        if target.nbytes:
            self._copy(target.ctypes.data, address, target.nbytes, "memcpyDeviceToHost")

    def fetch(self, address: int, nbytes: int) -> None:
        """Local. Begin to copy from a place on the device to what :meth:`finish` returns."""
        self._fetched = self._staging("down", nbytes)
        self.download(address, self._fetched)

    def finish(self) -> Bytes:
        """Local. Wait until what has begun is over.

        Returns:
            What was fetched, in memory of the lane, until it is used again.

        Raises:
            DistBackendError: CUDA failed.
            DeadlineExceededError: It is not over after ``MPIDIST_STALL_ABORT_S``.
        """
        if self._doing:
            with on_device(self._number, self._doing):
                wait_for(mark(self._stream), f"{self._doing} on GPU {self._number}")
            self._doing = ""
            for _, block in self._pinned.values():
                block.event = None
        fetched, self._fetched = self._fetched, None
        return _NOTHING if fetched is None else fetched

    def _make_room(self, nbytes: int) -> None:
        if self._there is None or self._there.nbytes < nbytes:
            length, self._there = size_class(nbytes), None
            kind = np.dtype(np.uint8)
            self._there = lasting_array(self._number, length, kind, f"memory for {self._doing}")

    def _staging(self, way: str, nbytes: int) -> Bytes:
        if way not in self._pinned or self._pinned[way][0].nbytes < nbytes:
            self._pinned.pop(way, None)
            self._pinned[way] = pinned_bytes(pinned_pool(), size_class(nbytes))
        return self._pinned[way][0][:nbytes]

    def _copy(self, target: int, source: int, nbytes: int, kind: str) -> None:
        for _, block in self._pinned.values():
            block.event = NEVER  # should it not end, this memory is used by nobody else
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, getattr(runtime, kind), self._stream.ptr)


_NOTHING: Bytes = np.empty(0, np.uint8)


def _starts(arrays: Sequence[Array]) -> list[int]:
    """Where arrays begin that lie one behind the other, and where the last ends."""
    sizes = [_padded(array.nbytes) for array in arrays]
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
