"""What the functions of users answer of an element: yes or no, or a whole number. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.checks import whole
from dataservice.dataset.functions import call, name_of
from mpidist.errors import InvalidArgumentError

_BOOLS = (bool, np.bool_)


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
    answer = call(predicate, element, whose)
    if isinstance(answer, _BOOLS):
        return bool(answer)
    answer = tree.on_host(answer)
    if isinstance(answer, int) or hasattr(answer, "__array__"):
        array = np.asarray(answer)
        if array.ndim == 0 and array.dtype.kind in "biu":
            return bool(array)
    raise _wrong(predicate, whose, answer, "a bool")


def number(function: Callable[..., Any], element: Any, whose: str) -> int:
    """Local. The whole number that a user's function gives for an element.

    Args:
        function: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        whose: The transformation's name, for messages.

    Raises:
        InvalidArgumentError: It gave something else.
        Exception: As :func:`call`.
    """
    answer = tree.on_host(call(function, element, whose))
    try:
        return whole(whose, "answer", answer)
    except TypeError:
        raise _wrong(function, whose, answer, "a whole number") from None


def _wrong(
    function: Callable[..., Any], whose: str, answer: Any, what: str
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the function {name_of(function)} given to {whose} returned {answer!r}: it must return "
        f"{what}"
    )
