"""Arrays of the host on their way to a device, ahead of their use there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.cuda.blocks import (
    NEVER,
    Block,
    Bytes,
    copy,
    device_pool,
    pinned_bytes,
    pinned_pool,
)
from mpidist.cuda.library import check_dtype, cupy, on_device
from mpidist.cuda.streams import current_stream, mark

_CHUNK_BYTES = 32 << 20  # pinned at a time: the host fills one while the device copies another


class Parcel:
    """Arrays on their way to a device; made by :meth:`Delivery.send`.

    Args:
        number: Of the device.
        arrays: On the device.
        blocks: The memory they lie in.
        event: Of CUDA, behind the last copy.
    """

    def __init__(
        self, number: int, arrays: Sequence[Any], blocks: Sequence[Block], event: Any
    ) -> None:
        self._number = number
        self._arrays = list(arrays)
        self._blocks = blocks
        self._event = event

    def hand_over(self) -> list[Any]:
        """Local. The arrays, for work on the current stream of this thread, which waits for them.

        The host does not wait. The memory is used again when the arrays and all views of them are
        gone, behind what that stream has to do then.
        """
        with on_device(self._number, "waiting for what was sent"):
            stream = current_stream(self._number)
            stream.wait_event(self._event)
        for block in self._blocks:
            block.stream = stream
        arrays, self._arrays = self._arrays, []
        return arrays


class Delivery:
    """Local. Copies arrays to a device, through pinned memory and on a stream of its own.

    Args:
        number: Of the device.

    Attributes:
        number: The same.

    Raises:
        FailedPreconditionError: There is no CuPy.
        DistBackendError: There is no such device.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        with on_device(number, "making a stream") as package:
            self._stream = package.cuda.Stream(non_blocking=True)

    def send(self, arrays: Sequence[NDArray[Any]]) -> Parcel:
        """Local. Begin to copy arrays; returns before they are there.

        Args:
            arrays: Of numbers or bools, any strides; may be changed once the call returns.

        Raises:
            TypeError: An array is of a dtype that CuPy does not have.
            ResourceExhaustedError: The device has no memory.
            DistBackendError: CUDA failed.
        """
        total = sum(array.nbytes for array in arrays)
        for array in arrays:
            check_dtype(array.dtype)
        with on_device(self.number, f"sending {total} bytes to it"):
            return self._begin(arrays)

    def _begin(self, arrays: Sequence[NDArray[Any]]) -> Parcel:
        placed = [place(self.number, array.shape, array.dtype) for array in arrays]
        blocks = [block for _, block in placed]
        for block in blocks:
            go_behind(self._stream, block)
            block.event = NEVER  # should there be no event behind the copies
        try:
            for array, (target, _) in zip(arrays, placed, strict=True):
                self._copy(array, target)
        finally:
            event = mark(self._stream)
            for block in blocks:
                block.event = event  # should nobody come to want them
        return Parcel(self.number, [target for target, _ in placed], blocks, event)

    def _copy(self, array: NDArray[Any], target: Any) -> None:
        native = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        source = native.reshape(-1).view(np.uint8)
        for start in range(0, source.nbytes, _CHUNK_BYTES):
            part = source[start : start + _CHUNK_BYTES]
            chunk, block = self._filled(part)
            there, here = target.data.ptr + start, chunk.ctypes.data
            copy(there, here, chunk.nbytes, "memcpyHostToDevice", self._stream, block)

    def _filled(self, part: Bytes) -> tuple[Bytes, Block]:
        chunk, block = pinned_bytes(pinned_pool(), part.nbytes)
        np.copyto(chunk, part)
        return chunk, block


def place(number: int, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Any, Block]:
    """Local. An array on the current device, in a block of memory that is lent to it.

    Args:
        number: Of the device.
        shape: Of the array.
        dtype: Of the array, in any byte order; it will be in this machine's.

    Raises:
        CUDARuntimeError: There is no memory.
    """
    cuda, pool = cupy().cuda, device_pool(number)
    block = pool.take(math.prod(shape) * dtype.itemsize)
    holder = _Holder(block)
    memory = cuda.UnownedMemory(block.memory.ptr, block.nbytes, holder, number)
    pool.lend(holder, block)
    pointer = cuda.MemoryPointer(memory, 0)
    return cupy().ndarray(tuple(shape), dtype.newbyteorder("="), pointer), block


def go_behind(stream: Any, block: Block) -> None:
    """Local. Let what a stream does from now on wait until nobody works on a block any more."""
    if block.event is not None:
        stream.wait_event(block.event)


class _Holder:
    """Lives as long as an array, or a view of it, and with it the memory."""

    def __init__(self, block: Block) -> None:
        self.block = block
