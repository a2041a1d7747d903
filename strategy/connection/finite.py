"""Whether gradients are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategy.connection.change import Change
from strategy.shared.shard import FLOATING

Array = NDArray[Any]

# What BLAS multiplies.
_VECTORS = (np.dtype(np.float32), np.dtype(np.float64))
_PART = 1 << 17  # elements that are looked at together: they and what comes of them are in a cache


def not_finite(changes: Sequence[Change]) -> list[str]:
    """Local. Names of the variables whose changes have elements that are NaN or infinite.

    Those too that would be in the variable's dtype.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        names = [
            change.remote.whole
            for change in changes
            if not _is_finite(change.data, change.remote.layout.dtype)
        ]
    return list(dict.fromkeys(names))


def _is_finite(data: Array, dtype: np.dtype[Any]) -> bool:
    kind = data.dtype
    if kind in _VECTORS:
        # At the speed of memory; but finite squares may be too large for their type.
        if math.isfinite(np.vdot(data, data)) and kind == dtype:
            return True
    elif kind.kind in "biu" and dtype != np.float16:  # the only one that some are too large for
        return True
    flat = data.reshape(-1)
    parts = [flat[start : start + _PART] for start in range(0, flat.size, _PART)]
    if kind in FLOATING:
        return all(np.isfinite(_largest(part).astype(dtype)) for part in parts)
    return all(np.isfinite(part.astype(dtype)).all() for part in parts)


def _largest(part: Array) -> Any:
    """The largest magnitude, NaN above all.

    Without their signs, floating-point numbers are ordered as the integers of the same bits, and
    NaN come last (IEEE 754-2019, 3.4). NumPy takes ten times as long to look for them in halves.
    """
    unsigned = np.dtype(f"u{part.itemsize}")
    magnitudes = part.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    return magnitudes.max(keepdims=True).view(part.dtype)[0]
