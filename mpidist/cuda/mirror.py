"""An array on a device, as host memory that MPI can read and write."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.cuda.blocks import Block, pinned_bytes, pinned_pool
from mpidist.cuda.device_array import DeviceArray
from mpidist.cuda.library import on_device

Array = NDArray[Any]


class Mirror(np.ndarray[Any, Any]):
    """Pinned host memory that stands for an array on a device; made by :func:`mirror`.

    Attributes:
        origin: The array on the device; None for views of the mirror, which stand for nothing.
    """

    origin: DeviceArray | None = None
    _block: Block

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        # What is computed of it is an array like any other.
        return array[()] if return_scalar else array

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.asarray(self).__reduce_ex__(protocol)

    def upload(self) -> None:
        """Local. Copy the values to the device, behind what the array's stream has to do."""
        if self.origin is not None:
            self.origin.upload(self, self._block)


def mirror(array: Any, *, read: bool = True) -> Mirror:
    """Local. Host memory for an array on a device.

    Args:
        array: See :class:`DeviceArray`.
        read: Whether to copy its values; waits for what its stream has to do before.

    Returns:
        A C-contiguous array of its shape and dtype; read-only where it is. Its values get to the
        device by :meth:`Mirror.upload`.

    Raises:
        FailedPreconditionError: There is no CuPy.
        TypeError: See :class:`DeviceArray`.
        ValueError: See :class:`DeviceArray`.
        ResourceExhaustedError: The host has no memory, or the device none to pack a strided array.
        DistBackendError: CUDA failed.
    """
    origin = DeviceArray(array)
    nbytes = origin.header.size * origin.dtype.itemsize
    with on_device(origin.number, f"copies of {origin}, of {nbytes} bytes of the host"):
        memory, block = pinned_bytes(pinned_pool(), nbytes)
    view: Mirror = memory.view(origin.dtype).reshape(origin.shape).view(Mirror)
    view.origin = origin
    view._block = block
    del memory
    if read:
        try:
            origin.download(view, block)
        except BaseException as error:
            # Who keeps the error shall not keep the memory, which these frames name.
            traceback.clear_frames(error.__traceback__)
            del view
            raise
    view.flags.writeable = origin.writeable
    return view


def layout_of(array: Array) -> Array:
    """Local. What tells where an array lies: of a mirror, where the array on the device does."""
    origin = array.origin if isinstance(array, Mirror) else None
    return array if origin is None else origin.header
