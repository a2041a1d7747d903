"""Formulas of optimizers on whole arrays, of NumPy or of CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strategy.rules.rule import Update

Formula = Callable[..., tuple[Any, ...]]
"""Returns the new values of a variable and of its slots.

Called as ``formula(param, grad, *slots, *numbers)``, either with arrays or with single elements.
It uses operators and NumPy's functions, and conditions on the numbers only.
"""


def on_arrays(formula: Formula) -> Callable[[Update], None]:
    """Return the update by a formula. The arrays are of NumPy, or all of CuPy on one GPU."""

    def apply(update: Update) -> None:
        targets = (update.param, *update.slots)
        results = formula(
            update.param, update.grad, *update.slots, *in_dtype(update.numbers, update.param.dtype)
        )
        for target, result in zip(targets, results, strict=True):
            target[:] = result

    return apply


def in_dtype(numbers: Sequence[float], dtype: np.dtype[Any]) -> list[Any]:
    """Return numbers as scalars of a dtype, so that they do not widen arrays."""
    return [dtype.type(number) for number in numbers]
