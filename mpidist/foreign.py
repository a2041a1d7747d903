"""The memory of other frameworks' arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ON_DEVICE = (
    "a {} in device memory cannot be sent by this version; pass a host copy, for example "
    "tensor.cpu() or cupy.asnumpy(array)"
)
_HOST = (1, 3, 11)  # DLPack's numbers of host memory: plain, and pinned by CUDA or ROCm
_IMMUTABLE = ("jax", "jaxlib")  # packages whose arrays must not be written


def view_of_tensor(tensor: Any, torch: Any) -> NDArray[Any]:
    """Local. The memory of a torch tensor as a NumPy array.

    DLPack would not do: NumPy's knows no bfloat16, and takes a negated tensor for a plain one.

    Args:
        tensor: The tensor; of the dtypes of NumPy or ml_dtypes, and dense.
        torch: The package.

    Raises:
        TypeError: It is on a device, not dense, or of another dtype.
        ValueError: It requires grad, or is conjugated or negated only when it is read.
    """
    try:
        return tensor.numpy()  # type: ignore[no-any-return]
    except (TypeError, RuntimeError) as error:
        reason = error
    if tensor.requires_grad:
        raise ValueError(
            "a tensor that requires grad cannot be sent or written, for autograd would not know; "
            "use tensor.detach(), which shares its memory"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"a tensor is not dense ({reason}); use the tensors that it is made of, or "
            "tensor.to_dense()"
        )
    if tensor.device.type == "meta":
        raise TypeError("a meta tensor has no memory; use torch.empty_like(tensor, device='cpu')")
    if tensor.device.type != "cpu":
        raise TypeError(ON_DEVICE.format(f"tensor on {tensor.device}"))
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a tensor that is conjugated or negated only when it is read has other values in its "
            "memory; use tensor.resolve_conj().resolve_neg(), a copy"
        )
    return _view_by_bits(tensor, torch, reason)


def view_by_dlpack(array: Any) -> NDArray[Any]:
    """Local. The memory of an array as a NumPy array; read-only where the array cannot change.

    Raises:
        TypeError: It is on a device, or NumPy cannot take it.
    """
    kind = type(array).__name__
    if array.__dlpack_device__()[0] not in _HOST:
        raise TypeError(ON_DEVICE.format(kind))
    try:
        if type(array).__module__.partition(".")[0] not in _IMMUTABLE:
            return np.from_dlpack(array)
        view = np.asarray(array).view()  # a view of it has bfloat16, and is known to be read-only
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"the memory of a {kind} cannot be used as it is ({error}); pass a NumPy array"
        ) from error
    view.flags.writeable = False
    return view


def _view_by_bits(tensor: Any, torch: Any, reason: Exception) -> NDArray[Any]:
    """A tensor of a dtype that NumPy has only through ml_dtypes."""
    import ml_dtypes

    dtype = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size())
    if dtype is None or bits is None:
        raise TypeError(f"a tensor of {tensor.dtype} has no NumPy array ({reason})")
    return tensor.view(bits).numpy().view(dtype)  # type: ignore[no-any-return]
