"""The memory of other frameworks' arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ON_DEVICE = (
    "a {} lies in the memory of a device that is no CUDA GPU; pass a host copy, for example "
    "tensor.cpu()"
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
    check_tensor(tensor, torch)
    if tensor.device.type != "cpu":
        raise TypeError(ON_DEVICE.format(f"tensor on {tensor.device}"))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size())
    if bits is None:
        raise TypeError(f"a tensor of {tensor.dtype} has no NumPy array ({reason})")
    return tensor.view(bits).numpy().view(dtype_of_tensor(tensor))  # type: ignore[no-any-return]


def check_tensor(tensor: Any, torch: Any) -> None:
    """Local. Whether the memory of a tensor is what the tensor is, and may be used.

    Args:
        tensor: On any device.
        torch: The package.

    Raises:
        TypeError: It is not dense, or has no memory.
        ValueError: It requires grad, or is conjugated or negated only when it is read.
    """
    if tensor.requires_grad:
        raise ValueError(
            "a tensor that requires grad cannot be sent or written, for autograd would not know; "
            "use tensor.detach(), which shares its memory"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"a tensor is not dense (its layout is {tensor.layout}); use the tensors that it is "
            "made of, or tensor.to_dense()"
        )
    if tensor.device.type == "meta":
        raise TypeError("a meta tensor has no memory; use torch.empty_like(tensor, device='cpu')")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a tensor that is conjugated or negated only when it is read has other values in its "
            "memory; use tensor.resolve_conj().resolve_neg(), a copy"
        )


def dtype_of_tensor(tensor: Any) -> np.dtype[Any]:
    """Local. NumPy's dtype for a tensor's; of ml_dtypes where NumPy has none.

    Raises:
        TypeError: Neither has one.
    """
    import ml_dtypes

    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise TypeError(f"a tensor of {tensor.dtype} has no NumPy array") from None


def view_by_dlpack(array: Any) -> NDArray[Any]:
    """Local. The memory of an array as a NumPy array; read-only where the array cannot change.

    Raises:
        TypeError: It is on a device, or NumPy cannot take it.
    """
    kind = type(array).__name__
    try:
        device = array.__dlpack_device__()[0]
    except (BufferError, RuntimeError, ValueError) as error:  # of several devices, for example
        raise TypeError(
            f"the memory of a {kind} cannot be used as it is ({error}); pass a NumPy array"
        ) from error
    if device not in _HOST:
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
