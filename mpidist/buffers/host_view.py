"""The memory of any array as a NumPy array."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.gpu import HostStaging, layout_of, lies_on_gpu, stage
from mpidist.tensors import check_tensor, numpy_dtype

Array = NDArray[Any]

_ON_DEVICE = (
    "a {} lies in the memory of a device that is no CUDA GPU; pass a host copy, for example "
    "tensor.cpu()"
)
_HOST = (1, 3, 11)  # DLPack's numbers of host memory: plain, pinned by CUDA or by ROCm
_IMMUTABLE = ("jax", "jaxlib")  # packages with immutable arrays


def host_view(array: Any, *, read: bool = True) -> Array:
    """Return the memory of an array as a NumPy array; for an array on a GPU, a pinned copy.

    Args:
        array: A NumPy array, or any array with DLPack, the buffer protocol or the CUDA array
            interface.
        read: Copy the values of an array on a GPU to the host, after the work that was queued on
            its stream. With False, the copy is for output only, and the array must be writable.

    Returns:
        A NumPy array over the same memory, read-only if the array is immutable, as JAX's arrays
        are. For an array on a GPU a :class:`mpidist.gpu.HostStaging`, whose ``upload()`` copies
        values to the GPU.

    Raises:
        TypeError: The object has no such interface, its memory is on a device that is not a CUDA
            GPU, or NumPy and ml_dtypes do not have its dtype.
        ValueError: A torch tensor requires grad, or is lazily conjugated or negated. Or an output
            on a GPU is read-only, or has elements that share memory.
        FailedPreconditionError: The array is on a GPU, and there is no CuPy.

    Example:
        >>> import array
        >>> import mpidist as dist
        >>> numbers = array.array("d", [1.0, 2.0])
        >>> dist.host_view(numbers)[0] = 5  # the same memory
        >>> numbers
        array('d', [5.0, 2.0])
    """
    if isinstance(array, np.ndarray):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _staged(array, read) if array.is_cuda else _view_of_tensor(array, torch)
    if lies_on_gpu(array):
        return _staged(array, read)
    kind = type(array).__name__
    if hasattr(array, "__dlpack__"):
        return _view_by_dlpack(array)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        if array is None:
            raise TypeError("None is not an array: does the parameter have a gradient?") from None
        raise TypeError(
            f"a {kind} is not an array: expected a NumPy array, or one with DLPack or the buffer "
            "protocol; lists and numbers go through numpy.asarray first"
        ) from None


def _staged(array: Any, read: bool) -> Array:
    view = stage(array, read=read)
    if not read:
        check_array(view, write=True)
    return view


def check_array(view: Array, write: bool) -> None:
    """Raise an error if an array cannot be sent or, with ``write``, cannot receive.

    Raises:
        TypeError: The array holds Python objects.
        ValueError: The array receives, but is read-only or has elements that share memory.
    """
    if view.dtype.hasobject:
        raise TypeError(f"dtype {view.dtype} holds Python objects, which MPI cannot send")
    if not write:
        return
    origin = view.origin if isinstance(view, HostStaging) else None
    contiguous = view.flags.c_contiguous if origin is None else origin.is_contiguous
    if view.flags.writeable and contiguous:
        return
    if not view.flags.writeable:
        raise ValueError(
            "the array receives a result but is read-only; pass a writable copy (for a scalar "
            "np.array(value), a 0-d array)"
        )
    layout = layout_of(view)
    if _overlaps_itself(layout):
        raise ValueError(
            f"the array receives a result, but elements of it share memory (shape {layout.shape}, "
            f"strides {layout.strides} bytes), as in an expanded or sliding view; pass a copy"
        )


def _overlaps_itself(view: Array) -> bool:
    """Return whether two elements share memory."""
    reach = view.itemsize
    dimensions = sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1)
    for stride, count in dimensions if view.size else ():
        if stride < reach:
            break
        reach += stride * (count - 1)
    else:
        return False  # as in all views by slicing and transposition
    if sum(s * (n - 1) for s, n in dimensions) + view.itemsize < view.nbytes:
        return True
    offsets = np.zeros((), np.intp)
    for stride, count in dimensions:
        offsets = np.add.outer(offsets, stride * np.arange(count))
    gaps = np.diff(np.sort(offsets, axis=None))
    return bool((gaps < view.itemsize).any())


def _view_of_tensor(tensor: Any, torch: Any) -> NDArray[Any]:
    """Return the memory of a torch tensor as a NumPy array.

    DLPack does not serve: NumPy's has no bfloat16, and ignores that a tensor is negated.

    Args:
        tensor: A dense tensor of a dtype of NumPy or ml_dtypes.
        torch: The package.

    Raises:
        TypeError: The tensor is on a device, not dense, or of another dtype.
        ValueError: The tensor requires grad, or is lazily conjugated or negated.
    """
    try:
        return tensor.numpy()  # type: ignore[no-any-return]
    except (TypeError, RuntimeError) as error:
        reason = error
    check_tensor(tensor, torch)
    if tensor.device.type != "cpu":
        raise TypeError(_ON_DEVICE.format(f"tensor on {tensor.device}"))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size())
    if bits is None:
        raise TypeError(f"a tensor of {tensor.dtype} has no NumPy array ({reason})")
    return tensor.view(bits).numpy().view(numpy_dtype(tensor.dtype))  # type: ignore[no-any-return]


def _view_by_dlpack(array: Any) -> NDArray[Any]:
    """Return the memory of an array as a NumPy array, read-only if the array is immutable.

    Raises:
        TypeError: The array is on a device, or NumPy cannot take it.
    """
    kind = type(array).__name__
    try:
        device = array.__dlpack_device__()[0]
    except (BufferError, RuntimeError, ValueError) as error:  # of several devices, for example
        raise TypeError(
            f"the memory of a {kind} cannot be used as it is ({error}); pass a NumPy array"
        ) from error
    if device not in _HOST:
        raise TypeError(_ON_DEVICE.format(kind))
    try:
        if type(array).__module__.partition(".")[0] not in _IMMUTABLE:
            return np.from_dlpack(array)
        view = np.asarray(array).view()  # NumPy's DLPack has no bfloat16
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"the memory of a {kind} cannot be used as it is ({error}); pass a NumPy array"
        ) from error
    view.flags.writeable = False
    return view
