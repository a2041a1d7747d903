"""A GPU of a server, and what the variables that lie there share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from mpidist.gpu import (
    Kernel,
    StagingStream,
    allocate_persistent,
    device_count,
    kernel,
    make_current,
)
from strategy.shared import gpu_kernels
from strategy.shared.shard import BLOCK_BYTES, HALVES

logger = logging.getLogger(__name__)

Array = NDArray[Any]

# The upload of a block, the kernel of the one before, and the download of the one before that.
LANES = 3


class Gpu:
    """Local. A GPU on which variables of a server lie. Used by the thread that serves.

    Args:
        number: By which CuPy knows it here.
        who: The server, for messages.

    Attributes:
        number: The same.

    Raises:
        FailedPreconditionError: There is no CuPy, or it can use no GPU.
        InvalidArgumentError: There is no such GPU.
        InternalError: CUDA failed.
    """

    def __init__(self, number: int, who: str) -> None:
        try:
            count = device_count()
        except errors.FailedPreconditionError as error:
            raise errors.FailedPreconditionError(
                f"{who} cannot have variables on its GPU {number}: {error.message}"
            ) from error
        if number >= count:
            raise errors.InvalidArgumentError(
                f"{who} sees {count} GPUs, and parameter_devices names its GPU {number}: their "
                f"numbers are 0 to {count - 1}; look at CUDA_VISIBLE_DEVICES of {who}"
            )
        self.number = number
        self._who = who
        with self.told():
            make_current(number)
            self._lanes = [StagingStream(number) for _ in range(LANES)]
        self._next = 0

    def __str__(self) -> str:
        return f"GPU {self.number}"

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Local. What CUDA fails with in the block is an InternalError, which workers are told."""
        try:
            yield
        except errors.DistBackendError as error:
            logger.exception("%s: its %s has failed", self._who, self)
            raise errors.InternalError(f"{self._who}: {error}") from error

    def lane(self) -> StagingStream:
        """Local. The lane for the next piece of work; the device is the current one then."""
        make_current(self.number)
        self._next = (self._next + 1) % LANES
        return self._lanes[self._next]

    def reserve(self, *arrays: Array) -> None:
        """Local. Have each lane have the memory that it takes to place arrays like these.

        Raises:
            ResourceExhaustedError: The device has no memory.
        """
        for _ in range(LANES):
            self.lane().reserve(*arrays)

    def array(self, size: int, dtype: np.dtype[Any], what: str) -> Any:
        """Local. A flat CuPy array, not initialized; of halves, one of their bits.

        Args:
            size: Number of elements.
            dtype: Theirs.
            what: For messages.

        Raises:
            ResourceExhaustedError: The device has no memory.
        """
        make_current(self.number)
        bits = np.dtype(np.uint16) if dtype in HALVES else dtype
        return allocate_persistent(self.number, size, bits, what)

    def kernel(self, text: str) -> Kernel:
        """Local. The kernel of a text, compiled."""
        make_current(self.number)
        found = kernel(text, gpu_kernels.NAME)
        found.compile(self.number)
        return found

    def fill(self, array: Any, value: float) -> None:
        """Local. Give all elements of an array a value."""
        lane = self.lane()
        with lane.working("filling a slot"), lane.current():
            array.fill(value)
        lane.finish()

    def pieces_of(self, array: Any) -> Iterator[Array]:
        """Local. What lies in an array of the device, piece by piece.

        Yields:
            Flat arrays of the host; each is overwritten by a later one.
        """
        step = BLOCK_BYTES // array.itemsize
        before: StagingStream | None = None
        for start in range(0, array.size, step):
            lane, count = self.lane(), min(step, array.size - start)
            with lane.working("downloading a slot"):
                lane.fetch(array.data.ptr + start * array.itemsize, count * array.itemsize)
            if before is not None:
                yield before.finish().view(array.dtype)
            before = lane
        if before is not None:
            yield before.finish().view(array.dtype)

    def put_pieces(self, array: Any, pieces: Iterator[Array]) -> None:
        """Local. Fill an array of the device with pieces of the host, one behind the other."""
        address = array.data.ptr
        for piece in pieces:
            lane = self.lane()
            with lane.working("uploading a slot"):
                lane.upload(address, piece.view(np.uint8), pinned=False)
            address += piece.nbytes
        self.settle()

    def settle(self) -> None:
        """Local. Wait until all lanes are idle."""
        make_current(self.number)
        for lane in self._lanes:
            lane.finish()

    def close(self) -> None:
        """Local. Let nothing be under way any more, as far as the device still answers.

        The memory of the lanes is given back.
        """
        with contextlib.suppress(errors.Error):  # it is lost, and nobody is left to be told
            self.settle()
        self._lanes = []
