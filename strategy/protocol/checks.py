"""Checks of numbers and arrays that users give."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray


def whole_number(**named: Any) -> int:
    """Return the integer of one keyword argument. Raise TypeError if it is not an integer."""
    ((name, value),) = named.items()
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None


Array = NDArray[Any]


def check_range(array: Array, dtype: np.dtype[Any], whose: str) -> None:
    """Raise ValueError if an array has integers that do not fit the dtype of a variable.

    Args:
        array: Array of any dtype. Only integers are checked.
        dtype: Dtype of the variable.
        whose: Description of the variable, for messages.
    """
    if array.dtype.kind not in "iu" or dtype.kind not in "iu" or not array.size:
        return
    if np.can_cast(array.dtype, dtype):
        return
    limits = np.iinfo(dtype)
    for number in (int(array.min()), int(array.max())):
        if not limits.min <= number <= limits.max:
            raise ValueError(
                f"{number} does not fit {dtype}, the dtype of {whose}, which goes from "
                f"{limits.min} to {limits.max}"
            )
