"""Asking the functions of users that say yes or no. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.functions import call


def holds(predicate: Callable[..., Any], element: Any, whose: str) -> bool:
    """Local. What a user's predicate says of an element.

    Args:
        predicate: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        whose: The transformation's name, for messages.

    Raises:
        TypeError: It gave no bool.
        Exception: As :func:`call`.
    """
    said = call(predicate, element, whose)
    if isinstance(said, bool):
        return said
    found = np.asarray(tree.on_host(said))
    if found.dtype != bool or found.shape:
        raise TypeError(f"the function given to {whose} gave {said!r}, which is neither yes nor no")
    return bool(found)
