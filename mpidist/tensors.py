"""Facts about torch tensors, on the host and on GPUs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


def check_tensor(tensor: Any, torch: Any) -> None:
    """Raise an error if the memory of a tensor does not hold its values, or must not be used.

    Args:
        tensor: A tensor on any device.
        torch: The package.

    Raises:
        TypeError: The tensor is not dense, or has no memory.
        ValueError: The tensor requires grad, or is lazily conjugated or negated.
    """
    if tensor.requires_grad:
        raise ValueError(
            "a tensor that requires grad cannot be sent or written, because autograd would not "
            "notice; use tensor.detach(), which shares its memory"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"a tensor is not dense (its layout is {tensor.layout}); use its component tensors, "
            "or tensor.to_dense()"
        )
    if tensor.device.type == "meta":
        raise TypeError("a meta tensor has no memory; use torch.empty_like(tensor, device='cpu')")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a lazily conjugated or negated tensor has other values in its memory; use "
            "tensor.resolve_conj().resolve_neg(), a copy"
        )


@cache  # a look-up by name takes 2 us
def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of NumPy or ml_dtypes for a dtype of torch.

    Raises:
        TypeError: There is none.
    """
    import ml_dtypes

    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise TypeError(f"a tensor of {dtype} has no NumPy array") from None
