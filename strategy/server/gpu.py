"""A GPU of a server: its memory, and copies to and from it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import errors
from mpidist.gpu import (
    Upload,
    allocate_persistent,
    cupy,
    device_count,
    divided,
    make_current,
    new_stream,
    on_device,
    record_event,
    stored_as,
    use_stream,
    wait_for,
    widened,
)

logger = logging.getLogger(__name__)

Array = NDArray[Any]

# Pinned memory for uploads that the GPU has not reached yet: the host may be faster than the GPU.
STAGED_BYTES = 64 << 20


class Gpu:
    """A GPU for variables of a server. Only the thread of the server's handlers uses it.

    Kernels and downloads run on one stream. Uploads run on the stream of all uploads to the GPU, so
    that they overlap the kernels. All methods but :meth:`working` are called in its block.

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
        self._staged = 0  # bytes uploaded since the last wait
        with self._told("making a stream"):
            make_current(number)
            self._stream = new_stream(number)

    @contextmanager
    def working(self, operation: str) -> Iterator[None]:
        """Run the work of the block on the stream of this GPU.

        Args:
            operation: The operation, for error messages.

        Raises:
            ResourceExhaustedError: The GPU or the host has no memory.
            InternalError: CUDA failed.
        """
        with self._told(operation):
            make_current(self.number)
            with on_device(self.number, "a kernel or copy"), use_stream(self._stream):
                yield

    @contextmanager
    def _told(self, operation: str) -> Iterator[None]:
        """Convert errors of CUDA to errors that workers receive."""
        try:
            yield
        except errors.ResourceExhaustedError as error:
            raise errors.ResourceExhaustedError(f"{operation}: {error.message}") from error
        except errors.DistBackendError as error:
            logger.exception("%s: its GPU %d has failed", self._server, self.number)
            raise errors.InternalError(f"{self._server}: {operation}: {error}") from error

    def array(self, size: int, dtype: np.dtype[Any], owner: str) -> Any:
        """Return a flat CuPy array, not initialized, in memory of its own.

        Args:
            size: Number of elements.
            dtype: Dtype of the elements.
            owner: The owner, for messages.
        """
        return allocate_persistent(self.number, size, dtype, owner)

    def up(self, values: Array, dtype: np.dtype[Any]) -> Any:
        """Start to upload a host array, which may be changed at once. Return the CuPy array.

        Args:
            values: A C-contiguous array.
            dtype: Dtype of the result: the dtype of ``values``, or float32 for halves.
        """
        self._staged += values.nbytes
        if self._staged > STAGED_BYTES:
            self.wait()
        upload = Upload(self.number, values.shape, stored_as(values.dtype))
        np.copyto(upload.host, values.view(upload.host.dtype))
        array = upload.start()
        return array if values.dtype == dtype else widened(array, values.dtype)

    def fill(self, array: Any, blocks: Iterable[Array]) -> None:
        """Start to upload all elements of a flat array.

        Args:
            array: The array on the GPU.
            blocks: The elements, see :meth:`up`, flat, block by block.
        """
        start = 0
        for block in blocks:
            array[start : start + block.size] = self.up(block, array.dtype)
            start += block.size

    def down(self, array: Any, target: Array) -> None:
        """Start to download an array. :meth:`wait` ends the download.

        Args:
            array: A C-contiguous array on the GPU.
            target: A C-contiguous host array, of the dtype of ``array`` or of halves.
        """
        if array.dtype != target.dtype:
            narrow = cupy().empty(array.shape, stored_as(target.dtype))
            divided(array, narrow, target.dtype, 1)
            array = narrow
        if target.nbytes:
            runtime = cupy().cuda.runtime
            places = target.ctypes.data, array.data.ptr, target.nbytes
            runtime.memcpyAsync(*places, runtime.memcpyDeviceToHost, self._stream.ptr)

    def wait(self) -> None:
        """Wait until all kernels and downloads have ended.

        Raises:
            DeadlineExceededError: They have not ended after ``MPIDIST_STALL_ABORT_S``.
        """
        self._staged = 0
        wait_for(record_event(self._stream), "GPU %d of %s", self.number, self._server)
