"""Asking the functions of users that say yes or no. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.functions import call
from mpidist.errors import InvalidArgumentError


def holds(predicate: Callable[..., Any], element: Any, whose: str) -> bool:
    """Local. What a user's predicate says of an element.

    Args:
        predicate: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        whose: The transformation's name, for messages.

    Raises:
        InvalidArgumentError: It gave neither a bool nor a whole number.
        Exception: As :func:`call`.
    """
    answer = tree.on_host(call(predicate, element, whose))
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    if isinstance(answer, int) or hasattr(answer, "__array__"):
        array = np.asarray(answer)
        if array.ndim == 0 and array.dtype.kind in "biu":
            return bool(array)
    name = getattr(predicate, "__qualname__", type(predicate).__qualname__)
    raise InvalidArgumentError(
        f"the function {name} given to {whose} gave {answer!r}: it must return a bool"
    )
