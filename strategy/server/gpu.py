"""A GPU of a server, and the staging streams that its variables share."""

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

# One lane uploads a block while another one runs kernels and a third one downloads.
LANES = 3


class Gpu:
    """A GPU for variables of a server. Only the thread of the server's handlers uses it.

    Copies and kernels run on lanes, which are staging streams that take turns.

    Args:
        number: Index of the GPU in CuPy.
        server: Name of the server, for error messages.

    Attributes:
        number: Index of the GPU in CuPy.

    Raises:
        FailedPreconditionError: CuPy is not installed, or cannot use a GPU.
        InvalidArgumentError: The GPU does not exist.
        InternalError: CUDA failed.
    """

    def __init__(self, number: int, server: str) -> None:
        try:
            count = device_count()
        except errors.FailedPreconditionError as error:
            raise errors.FailedPreconditionError(
                f"{server} cannot have variables on its GPU {number}: {error.message}"
            ) from error
        if number >= count:
            raise errors.InvalidArgumentError(
                f"{server} sees {count} GPUs, and parameter_devices names its GPU {number}: their "
                f"numbers are 0 to {count - 1}; look at CUDA_VISIBLE_DEVICES of {server}"
            )
        self.number = number
        self._server = server
        with self.told():
            make_current(number)
            self._lanes = [StagingStream(number) for _ in range(LANES)]
        self._next = 0

    def __str__(self) -> str:
        return f"GPU {self.number}"

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Convert errors of CUDA in the block to InternalError, which workers receive."""
        try:
            yield
        except errors.DistBackendError as error:
            logger.exception("%s: its %s has failed", self._server, self)
            raise errors.InternalError(f"{self._server}: {error}") from error

    def lane(self) -> StagingStream:
        """Make the device current and return the next lane."""
        make_current(self.number)
        self._next = (self._next + 1) % LANES
        return self._lanes[self._next]

    def reserve(self, *arrays: Array) -> None:
        """Allocate the memory that each lane needs to place arrays of these sizes.

        Raises:
            ResourceExhaustedError: The device has no memory.
        """
        for _ in range(LANES):
            self.lane().reserve(*arrays)

    def array(self, size: int, dtype: np.dtype[Any], what: str) -> Any:
        """Allocate a flat CuPy array, not initialized. An array of halves holds their bits, uint16.

        Args:
            size: Number of elements.
            dtype: Dtype of the elements.
            what: Name of the array, for messages.

        Raises:
            ResourceExhaustedError: The device has no memory.
        """
        make_current(self.number)
        bits = np.dtype(np.uint16) if dtype in HALVES else dtype
        return allocate_persistent(self.number, size, bits, what)

    def kernel(self, text: str) -> Kernel:
        """Return the compiled kernel of a source text."""
        make_current(self.number)
        found = kernel(text, gpu_kernels.NAME)
        found.compile(self.number)
        return found

    def fill(self, array: Any, value: float) -> None:
        """Set all elements of an array to a value."""
        lane = self.lane()
        with lane.working("filling a slot"), lane.current():
            array.fill(value)
        lane.finish()

    def pieces_of(self, array: Any) -> Iterator[Array]:
        """Download an array of the device, block by block.

        Yields:
            Flat host arrays. Each is overwritten by a later one.
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
        """Fill an array of the device with the elements of host arrays, in order."""
        address = array.data.ptr
        for piece in pieces:
            lane = self.lane()
            with lane.working("uploading a slot"):
                lane.upload(address, piece.view(np.uint8), pinned=False)
            address += piece.nbytes
        self.settle()

    def settle(self) -> None:
        """Wait until all lanes are idle."""
        make_current(self.number)
        for lane in self._lanes:
            lane.finish()

    def close(self) -> None:
        """Wait until all lanes are idle, unless the device is lost, and free their memory."""
        with contextlib.suppress(errors.Error):  # no worker waits for the error
            self.settle()
        self._lanes = []
