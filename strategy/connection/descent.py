"""Gradient descent in the memory of a ps task, compiled by numba. Needs the extra ``fast``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.compiling import compiled, compiled_fence

Array = NDArray[Any]

_fence = compiled_fence()


@compiled
def _subtract(param: Any, grad: Any, rate: Any) -> None:
    for i in range(param.size):
        param[i] -= grad[i] * rate


@compiled
def _descend(versions: Any, param: Any, grad: Any, rate: Any, step: int) -> None:
    for block in range(versions.size):
        here = slice(block * step, (block + 1) * step)
        versions[block] += 1
        _fence()
        _subtract(param[here], grad[here], rate)
        _fence()
        versions[block] += 1


def descend(versions: Array, param: Array, grad: Array, rate: np.generic, step: int) -> None:
    """Subtract a gradient times a learning rate, block by block.

    Args:
        versions: Version of each block; odd while the block changes.
        param: Values, flat, float32 or float64; changed in place.
        grad: The gradient, of the same length and dtype.
        rate: The learning rate, of the same dtype.
        step: Elements of a block.
    """
    _descend(versions, param, grad, rate, step)
