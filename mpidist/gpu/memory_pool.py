"""Pools of the memory that GPUs copy from and to: pinned host memory, and memory on a device.

Pinning host memory takes longer than copying it, and memory that one stream has released must not
be written by another stream that runs ahead. So blocks are kept, each with an event behind its
last use.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpidist.gpu.cupy_api import cuda_errors, cupy, is_final, on_device
from mpidist.gpu.streams import current_stream, is_done, logger, record_event
from mpidist.leases import Leases

Bytes = NDArray[np.uint8]
Kind = TypeVar("Kind", bound=NDArray[Any])

IDLE_BYTES = 512 << 20
_MIN_BYTES = 4096
_LOOKS = 4
UNTRACKED = object()
"""In place of a block's event: a device uses the block, and no event tells when the use ends."""


class Block:
    """A block of memory.

    Args:
        memory: The object that holds the memory.
        nbytes: Size.
        address: Address of the first byte.

    Attributes:
        memory: The object that holds the memory.
        nbytes: Size.
        address: Address of the first byte.
        event: CUDA's event behind the last use by a device, or None. UNTRACKED until a use that
            has started has its event; a block that stays so is never used again.
        stream: The stream on which the array in the block is used without further events, or None.
    """

    def __init__(self, memory: Any, nbytes: int, address: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.address = address
        self.event: Any = None
        self.stream: Any = None

    def is_idle(self) -> bool:
        """Return whether no device uses the block."""
        if self.event is None or self.event is UNTRACKED:
            return self.event is None
        try:
            if not is_done(self.event):
                return False
        except cuda_errors():  # a device that has failed may still write
            return False
        self.event = None
        return True


class BlockPool:
    """Lends blocks of memory, and takes each back when its last holder is gone.

    Args:
        allocate: Returns memory of a number of bytes.
        device: Index of the device that holds the memory; None for host memory.
        fallback: Returns memory in place of ``allocate``, given the size and the error of that.
        idle_bytes: How much may lie idle when a block of another size is allocated.
    """

    def __init__(
        self,
        allocate: Callable[[int], Any],
        device: int | None = None,
        fallback: Callable[[int, Exception], Any] | None = None,
        idle_bytes: int = IDLE_BYTES,
    ) -> None:
        self._allocate = allocate
        self._device = device
        self._fallback = fallback
        self._idle_bytes = idle_bytes
        self._idle: dict[int, deque[Block]] = {}  # by size, the earliest returned first
        self._unusable: list[Block] = []  # devices may still write to them
        # The garbage collector ends holders on any thread, also on one that holds the lock. So
        # returned blocks wait here, and the next call sorts them in.
        self._returned: deque[Block] = deque()
        self._leases = Leases(self._take_back)
        self._lock = threading.RLock()  # a signal handler may take memory, too
        self._process = os.getpid()

    def take(self, nbytes: int) -> Block:
        """Return a block of at least this size, not initialized, for :meth:`lend`.

        A block of a device, which must be current, may have an event. A stream that writes to the
        block must wait for the event first.
        """
        size = size_class(nbytes)
        with self._lock:
            self._sort_in()
            block = self._take_idle(size)
            if block is None:
                self._free_excess()
                block = self._take_used(size)
        return self._new_block(size) if block is None else block

    def lend(self, holder: Any, block: Block) -> None:
        """Take a block back once an object and all views of it are gone."""
        self._leases.lend(holder, block)

    def idle_bytes(self) -> int:
        """Return how much memory lies idle."""
        with self._lock:
            self._sort_in()
            return self._idle_total()

    def drop_idle(self) -> None:
        """Free the idle blocks that no device uses."""
        with self._lock:
            self._sort_in()
            for size, blocks in self._idle.items():
                self._idle[size] = deque(block for block in blocks if not block.is_idle())

    def lent_bytes(self) -> int:
        """Return how much memory is lent."""
        return sum(block.nbytes for block in self._leases.lent())

    def _take_back(self, block: Block) -> None:
        if sys.is_finalizing():  # CUDA may be gone
            return
        if os.getpid() != self._process:  # the memory belongs to the parent's CUDA
            self._unusable.append(block)
            return
        if block.stream is not None and self._device is not None:
            stream, block.stream, block.event = block.stream, None, UNTRACKED
            # A finalizer cannot raise. Without its event the block is not used again.
            with suppress(Exception), on_device(self._device, "releasing memory"):
                block.event = record_event(stream)
        self._returned.append(block)

    def _sort_in(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if block.event is UNTRACKED:
                self._unusable.append(block)
            else:
                self._idle.setdefault(block.nbytes, deque()).append(block)

    def _take_idle(self, size: int) -> Block | None:
        blocks = self._idle.get(size, deque())
        # Devices end their work in about this order: if the first few are in use, most are.
        for _ in range(min(_LOOKS, len(blocks))):
            block = blocks.popleft()
            if block.is_idle():
                return block
            blocks.append(block)  # one device may be late, so the next call looks at others
        return None

    def _take_used(self, size: int) -> Block | None:
        """Return a block that its device still uses, once much memory is kept.

        Otherwise a host that runs ahead of its device would fill the device's memory.
        """
        blocks = self._idle.get(size)
        if self._device is None or not blocks or self._idle_total() < self._idle_bytes:
            return None
        return blocks.popleft()

    def _free_excess(self) -> None:
        excess = self._idle_total() - self._idle_bytes
        for size in sorted(self._idle, reverse=True) if excess > 0 else ():
            while excess > 0 and self._take_idle(size) is not None:
                excess -= size

    def _idle_total(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    def _new_block(self, size: int) -> Block:
        memory = self._memory(size)
        if self._device is None:
            return Block(memory, size, np.frombuffer(memory, np.uint8, size).ctypes.data)
        block = Block(memory, size, memory.ptr)
        # CuPy's pool returns memory that work queued on the current stream may still use, and
        # blocks are written on other streams.
        block.event = record_event(current_stream(self._device))
        return block

    def _memory(self, size: int) -> Any:
        try:
            return self._allocate(size)
        except cuda_errors():
            self.drop_idle()
        try:
            return self._allocate(size)
        except cuda_errors() as error:
            if self._fallback is None or is_final(error):
                raise
            return self._fallback(size, error)


def size_class(nbytes: int) -> int:
    """Return the size of a block: at least 4 KiB, and one of four sizes an octave."""
    if nbytes <= _MIN_BYTES:
        return _MIN_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def pinned_array(
    pool: BlockPool, shape: Sequence[int], dtype: np.dtype[Any], kind: type[Kind]
) -> tuple[Kind, Block]:
    """Return an array in a new block of host memory; the end of the array returns the block.

    Args:
        pool: The pool.
        shape: Shape of the array.
        dtype: Dtype of the array.
        kind: The class of the array.
    """
    block = pool.take(math.prod(shape) * dtype.itemsize)
    array = kind(shape, dtype, block.memory)
    pool.lend(array, block)
    return array, block


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


def pinned_pool() -> BlockPool:
    """Return the pool of pinned host memory; it lends ordinary memory if none can be pinned."""
    return _pinned_pool


def device_pool(device: int) -> BlockPool:
    """Return the pool of memory on a device for arrays that are copied there."""
    with _creating:
        if device not in _device_pools:
            _device_pools[device] = BlockPool(lambda nbytes: cupy().cuda.alloc(nbytes), device)
        return _device_pools[device]


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


_pinned_pool = BlockPool(_pin, None, _ordinary_memory)
_device_pools: dict[int, BlockPool] = {}
_creating = threading.Lock()
