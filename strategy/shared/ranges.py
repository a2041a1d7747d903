"""Whether integers fit the dtype that they are to have. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def check_range(array: Array, dtype: np.dtype[Any], whose: str) -> None:
    """Local. ValueError if an array has integers that do not fit a variable's dtype.

    Args:
        array: Of any dtype; of others than integers nothing is looked at.
        dtype: The variable's.
        whose: That variable, for messages.
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
