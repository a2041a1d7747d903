"""Copies of gradients on their way to the ps tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def copy_scaled(target: Array, source: Array, scale: float) -> None:
    """Copy an array, converted to the dtype of the target, and multiplied."""
    if scale == 1.0:
        np.copyto(target, source, casting="same_kind")
    else:  # not in the precision of halves or integers, where the factor may be nothing
        wide = np.result_type(source.dtype, target.dtype, np.float32)
        np.multiply(source, scale, out=target, dtype=wide, casting="unsafe")
