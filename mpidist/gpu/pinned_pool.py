"""A pool of pinned host memory, for copies between the host and GPUs.

Pinning host memory takes longer than copying it, so blocks are kept. A block is used again once the
copies from and to it have ended.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpidist.gpu.cupy_api import cuda_errors, cupy, is_final
from mpidist.gpu.streams import is_done, logger
from mpidist.leases import Leases

Bytes = NDArray[np.uint8]
Kind = TypeVar("Kind", bound=NDArray[Any])

IDLE_BYTES = 512 << 20
_MIN_BYTES = 4096
_LOOKS = 4
UNTRACKED = object()
"""In place of a block's event: a device uses the block, and no event tells when the use ends."""


class Block:
    """A block of host memory.

    Args:
        memory: The object that holds the memory.
        nbytes: Size.

    Attributes:
        memory: The object that holds the memory.
        nbytes: Size.
        address: Address of the first byte.
        event: CUDA's event behind the last copy, or None. UNTRACKED until a copy that has started
            has its event; a block that stays so is never used again.
    """

    def __init__(self, memory: Any, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.address = np.frombuffer(memory, np.uint8, nbytes).ctypes.data
        self.event: Any = None

    def is_idle(self) -> bool:
        """Return whether no device uses the block."""
        if self.event is not None:
            try:
                if self.event is UNTRACKED or not is_done(self.event):
                    return False
            except cuda_errors():  # a device that has failed may still write
                return False
            self.event = None
        return True


class PinnedPool:
    """Lends blocks as arrays, and takes each back when the last view of its array is gone.

    Args:
        idle_bytes: How much may lie idle when a block of another size is allocated.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self._idle_bytes = idle_bytes
        self._idle: dict[int, deque[Block]] = {}  # by size, the earliest returned first
        self._unusable: list[Block] = []  # devices may still write to them
        self._leases = Leases(self._take_back)
        self._lock = threading.RLock()  # of the dict; a signal handler may take memory, too

    def array(
        self, shape: Sequence[int], dtype: np.dtype[Any], kind: type[Kind]
    ) -> tuple[Kind, Block]:
        """Return an array in host memory, not initialized, and its block.

        The memory is ordinary memory, after one warning, if none can be pinned.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.
            kind: The class of the array.
        """
        block = self._take(size_class(math.prod(shape) * dtype.itemsize))
        array = kind(shape, dtype, block.memory)
        self._leases.lend(array, block)
        return array, block

    def _take(self, size: int) -> Block:
        with self._lock:
            block = self._take_idle(self._idle.setdefault(size, deque()))
            if block is None:
                self._free_excess()
        return Block(self._new_memory(size), size) if block is None else block

    def _take_back(self, block: Block) -> None:
        # The garbage collector ends arrays on any thread, also on one that holds the lock.
        blocks = self._unusable if block.event is UNTRACKED else self._idle[block.nbytes]
        blocks.append(block)

    def _take_idle(self, blocks: deque[Block]) -> Block | None:
        # Devices end their work in about this order: if the first few are in use, most are.
        for _ in range(min(_LOOKS, len(blocks))):
            block = blocks.popleft()
            if block.is_idle():
                return block
            blocks.append(block)  # one device may be late, so the next call looks at others
        return None

    def _free_excess(self) -> None:
        excess = -self._idle_bytes
        excess += sum(size * len(blocks) for size, blocks in self._idle.items())
        for size in sorted(self._idle, reverse=True):
            while excess > 0 and self._take_idle(self._idle[size]) is not None:
                excess -= size

    def _free_idle(self) -> None:
        with self._lock:
            for blocks in self._idle.values():
                for _ in range(len(blocks)):
                    block = blocks.popleft()
                    if not block.is_idle():
                        blocks.append(block)

    def _new_memory(self, size: int) -> Any:
        try:
            return _pin(size)
        except cuda_errors():
            self._free_idle()
        try:
            return _pin(size)
        except cuda_errors() as error:
            if is_final(error):
                raise
            return _ordinary_memory(size, error)


def size_class(nbytes: int) -> int:
    """Return the size of a block: at least 4 KiB, and one of four sizes an octave."""
    if nbytes <= _MIN_BYTES:
        return _MIN_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def start_copy(target: int, source: int, nbytes: int, kind: str, stream: Any, block: Block) -> Any:
    """Start a copy between the current device and the host. Return the event behind the copy.

    Args:
        target: Address.
        source: Address.
        nbytes: Number of bytes.
        kind: CUDA's name for the direction.
        stream: CuPy's stream for the copy.
        block: The host memory; receives the event.

    Raises:
        CUDARuntimeError: CUDA failed, and the copy has not started.
    """
    cuda = cupy().cuda
    event, before = cuda.Event(disable_timing=True), block.event
    block.event = UNTRACKED  # stays so if an exception interrupts the thread from here on
    try:
        cuda.runtime.memcpyAsync(target, source, nbytes, getattr(cuda.runtime, kind), stream.ptr)
    except cuda_errors():
        block.event = before
        raise
    event.record(stream)
    block.event = event
    return event


def _pin(nbytes: int) -> Any:
    # CuPy's own pool of pinned memory rounds up to powers of two, and never frees.
    cuda = cupy().cuda
    memory = cuda.PinnedMemory(nbytes, cuda.runtime.hostAllocPortable)
    return cuda.PinnedMemoryPointer(memory, 0)


_warned: list[int] = []


def _ordinary_memory(nbytes: int, error: Exception) -> bytearray:
    if not _warned:
        _warned.append(nbytes)
        logger.warning(
            "no %d bytes of host memory can be pinned for copies to and from GPUs (%s): ordinary "
            "memory is used, and copies are slower; see how much is free, and the limits that "
            "containers and batch systems set",
            nbytes,
            str(error),  # a handler that keeps the record must not keep the error's frames
        )
    return bytearray(nbytes)


pool = PinnedPool()
"""The pool of this process."""
