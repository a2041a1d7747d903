"""Memory that a GPU copies from or to, used again once no device works on it.

To pin memory of the host takes longer than to copy it, and memory of a device that one stream has
given back must not be written by another that runs ahead: so both are kept, with an event behind
their last use.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.cuda.failures import is_final
from mpidist.cuda.library import cupy, errors_of_cuda, on_device
from mpidist.cuda.streams import current_stream, has_come, logger, mark
from mpidist.leases import Leases

Bytes = NDArray[np.uint8]

IDLE_BYTES = 512 << 20  # what is kept at most for later, if no more has been needed at once lately
_HALF_LIFE_S = 60.0  # in which half of what was needed is forgotten
_SLACK = 1.25  # so that what is needed again and again is not given up shortly before
_LEAST_BYTES = 4096
_LOOKS = 4
NEVER = object()
"""An event that does not come."""


class Block:
    """A piece of memory.

    Attributes:
        memory: What holds it.
        nbytes: How long it is.
        event: Of CUDA, behind the last use by a device; None if there is none. NEVER while one is
            under way that has no event yet: should that stay so, the block is used no more.
        stream: On which it is used as long as it is lent, without further events; or None.
    """

    def __init__(self, memory: Any, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.event: Any = None
        self.stream: Any = None

    def is_idle(self) -> bool:
        """Local. Whether no device works on it any more."""
        if self.event is None or self.event is NEVER:
            return self.event is None
        try:
            if not has_come(self.event):
                return False
        except errors_of_cuda():  # nobody knows what a device does after that
            return False
        self.event = None
        return True


class BlockPool:
    """Lends memory, and has it back when the last holder is gone.

    Args:
        allocate: Gives memory of so many bytes.
        device: The device that works on it; for memory of the host, which any may use, None.
        otherwise: Gives memory when ``allocate`` has failed, by its error; without it that is
            raised.
        idle_bytes: How much may lie idle.
    """

    def __init__(
        self,
        allocate: Callable[[int], Any],
        device: int | None = None,
        otherwise: Callable[[int, Exception], Any] | None = None,
        idle_bytes: int = IDLE_BYTES,
    ) -> None:
        self._allocate = allocate
        self._device = device
        self._otherwise = otherwise
        self._idle_bytes = idle_bytes
        self._idle: dict[int, deque[Block]] = {}  # those that came back first come first
        self._unusable: list[Block] = []  # devices may still write to them
        self._taken = 0  # bytes that somebody has now
        self._needed = 0.0  # most of those, lately
        self._noted = time.monotonic()
        # Holders die anywhere, in this thread too while it holds the lock: what comes back waits.
        self._returned: deque[Block] = deque()
        self._leases = Leases(self._came_back)
        self._lock = threading.RLock()  # a signal's handler may want memory, too
        self._process = os.getpid()

    def take(self, nbytes: int) -> Block:
        """Local. Memory for so many bytes, not initialized; to be lent, or lost.

        That of a device, which must be current, may have an event: whoever writes to it comes
        behind that.
        """
        size = size_class(nbytes)
        with self._lock:
            self._sort_in()
            block = self._idle_block(size) or self._late_block(size)
            self._taken += size
            self._note_need()
            self._trim()  # what was needed is not too much
        if block is not None:
            return block
        try:
            return self._new_block(size)
        except BaseException:
            with self._lock:
                self._taken -= size
            raise

    def lend(self, holder: Any, block: Block) -> None:
        """Local. Have a block back once an object is gone, and every view of it."""
        self._leases.lend(holder, block)

    def idle_bytes(self) -> int:
        """Local. How much lies idle."""
        with self._lock:
            self._sort_in()
            self._trim()
            return self._idle_total()

    def drop_idle(self) -> None:
        """Local. Keep nothing for later."""
        with self._lock:
            self._sort_in()
            for length, blocks in self._idle.items():
                self._idle[length] = deque(block for block in blocks if not block.is_idle())

    def lent_bytes(self) -> int:
        """Local. How much is lent now."""
        return sum(block.nbytes for block in self._leases.lent())

    def _came_back(self, block: Block) -> None:
        if sys.is_finalizing():  # CUDA may be gone
            return
        if os.getpid() != self._process:  # CUDA is elsewhere, and nothing can be freed here
            self._unusable.append(block)
            return
        if block.stream is not None and self._device is not None:
            stream, block.stream, block.event = block.stream, None, NEVER
            # Nobody could take an error here; without the event the block is used no more.
            with suppress(Exception), on_device(self._device, "giving memory back"):
                block.event = mark(stream)
        self._returned.append(block)

    def _idle_total(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    def _sort_in(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._taken -= block.nbytes
            if block.event is NEVER:
                self._unusable.append(block)
            else:
                self._idle.setdefault(block.nbytes, deque()).append(block)

    def _note_need(self) -> None:
        now = time.monotonic()
        faded = self._needed * 0.5 ** ((now - self._noted) / _HALF_LIFE_S)
        self._needed, self._noted = max(self._taken, faded), now

    def _trim(self) -> None:
        excess = self._idle_total() - max(self._idle_bytes, _SLACK * self._needed - self._taken)
        for size in sorted(self._idle, reverse=True) if excess > 0 else ():
            while excess > 0 and self._idle_block(size) is not None:
                excess -= size

    def _idle_block(self, size: int) -> Block | None:
        blocks = self._idle.get(size, deque())
        # Devices come to them in about this order: where the first few are busy, most are.
        for _ in range(min(_LOOKS, len(blocks))):
            block = blocks.popleft()
            if block.is_idle():
                return block
            blocks.append(block)  # perhaps one device is late: next time others are looked at
        return None

    def _late_block(self, size: int) -> Block | None:
        """Of a device for which much is kept already, one that it still works on.

        Else hosts that run ahead of their device would fill its memory.
        """
        blocks = self._idle.get(size)
        if self._device is None or not blocks or self._idle_total() < self._idle_bytes:
            return None
        return blocks.popleft()

    def _new_block(self, size: int) -> Block:
        block = Block(self._memory(size), size)
        if self._device is not None:
            # CuPy's pool gives at once what has been given back on this stream: work that is
            # queued here may use it, and those who write to blocks do so on streams of their own.
            block.event = mark(current_stream(self._device))
        return block

    def _memory(self, size: int) -> Any:
        errors = errors_of_cuda()
        try:
            return self._allocate(size)
        except errors:
            self.drop_idle()  # what is kept for later is worth less than this
        try:
            return self._allocate(size)
        except errors as error:
            if self._otherwise is None or is_final(error):
                raise
            return self._otherwise(size, error)


def size_class(nbytes: int) -> int:
    """Local. How long a block for so many bytes is: four lengths an octave, so that few differ."""
    if nbytes <= _LEAST_BYTES:
        return _LEAST_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def pinned_bytes(pool: BlockPool, nbytes: int) -> tuple[Bytes, Block]:
    """Local. Memory of a pool of host memory as an array, whose end gives it back."""
    block = pool.take(nbytes)
    array = np.frombuffer(block.memory, np.uint8, nbytes)
    pool.lend(array, block)
    return array, block


def copy(target: int, source: int, nbytes: int, kind: str, stream: Any, block: Block) -> None:
    """Local. Begin a copy between the current device and the host.

    Args:
        target: Address.
        source: Address.
        nbytes: How many bytes.
        kind: CUDA's name for the direction.
        stream: On which.
        block: What the memory of the host lies in; its event then is one behind the copy.

    Raises:
        CUDARuntimeError: CUDA failed; nothing has begun.
    """
    cuda = cupy().cuda
    event, before = cuda.Event(disable_timing=True), block.event
    block.event = NEVER  # what interrupts this from now on leaves nobody who knows
    try:
        cuda.runtime.memcpyAsync(target, source, nbytes, getattr(cuda.runtime, kind), stream.ptr)
    except errors_of_cuda():
        block.event = before
        raise
    event.record(stream)
    block.event = event


def pinned_pool() -> BlockPool:
    """Local. The pinned memory of this process; where none can be pinned, ordinary memory."""
    return _pinned_pool


def device_pool(number: int) -> BlockPool:
    """Local. The memory on a device for what is brought there."""
    with _making:
        if number not in _device_pools:
            _device_pools[number] = BlockPool(lambda nbytes: cupy().cuda.alloc(nbytes), number)
        return _device_pools[number]


def _pinned(nbytes: int) -> Any:
    """Not from CuPy's own pool, which rounds up to powers of two, and keeps all for ever."""
    cuda = cupy().cuda
    memory = cuda.PinnedMemory(nbytes, cuda.runtime.hostAllocPortable)
    return cuda.PinnedMemoryPointer(memory, 0)


_warned: list[int] = []


def _not_pinned(nbytes: int, error: Exception) -> bytearray:
    if not _warned:
        _warned.append(nbytes)
        logger.warning(
            "no %d bytes of host memory can be pinned for copies to and from GPUs (%s): ordinary "
            "memory is used, and copies are slower; see how much is free, and what containers and "
            "batch systems allow",
            nbytes,
            str(error),  # who keeps the record shall not keep what frames name
        )
    return bytearray(nbytes)


_pinned_pool = BlockPool(_pinned, None, _not_pinned)
_device_pools: dict[int, BlockPool] = {}
_making = threading.Lock()
