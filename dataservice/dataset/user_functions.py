"""Checks of users' arguments, and calls of users' functions."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from dataservice.dataset import tree
from mpidist.errors import InvalidArgumentError


def whole(method: str, name: str, value: Any) -> int:
    """Local. An argument as Python's whole number, which NumPy's become.

    Args:
        method: Of the dataset.
        name: Of the argument.
        value: What is given.

    Raises:
        TypeError: It is no whole number.
    """
    with suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)
    raise TypeError(f"{method} needs a whole number as {name}, not {value!r}")


def whole_or_none(method: str, name: str, value: Any) -> int | None:
    """Local. As :func:`whole`, of an argument that may be None."""
    return None if value is None else whole(method, name, value)


def wholes(method: str, name: str, values: Any) -> tuple[int, ...]:
    """Local. As :func:`whole`, of several numbers."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{method} needs whole numbers as {name}, not {values!r}")
    return tuple(whole(method, name, value) for value in values)


def only_one(method: str, **given: Any) -> Any:
    """Local. An argument that has several names; TypeError if more than one of them is used."""
    used = {name: value for name, value in given.items() if value is not None}
    if len(used) > 1:
        raise TypeError(f"{method} takes only one of {' and '.join(used)}, which mean the same")
    return next(iter(used.values()), None)


def check_callable(method: str, name: str, value: Any) -> Any:
    """Local. An argument that can be called; TypeError if it cannot."""
    if not callable(value):
        raise TypeError(f"{method} needs a function as {name}, not {value!r}")
    return value


def check_path(method: str, name: str, value: Any) -> str:
    """Local. An argument as the text of a path; TypeError if it is none."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{method} needs a path as {name}, not {value!r}") from None


def check_numbers(method: str, name: str, values: Any) -> list[float]:
    """Local. An argument as a list of numbers; TypeError if it is none."""
    with suppress(TypeError, ValueError):
        # An endless dataset has no length, and no list can be made of it.
        if len(values) >= 0 and not isinstance(values, str | bytes):
            return [float(value) for value in values]
    raise TypeError(f"{method} needs a list of numbers as {name}, not {values!r}")


def name_of(function: Callable[..., Any]) -> str:
    """Local. What a function is called in messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def call(function: Callable[..., Any], element: Any, whose: str) -> Any:
    """Local. What a user's function makes of an element.

    Args:
        function: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        whose: The transformation's name, for messages.

    Raises:
        RuntimeError: It raised StopIteration, which would pass for the end of the sequence, and
            elements would be missing silently.
        Exception: What it raises.
    """
    try:
        return function(*element) if type(element) is tuple else function(element)
    except StopIteration as error:
        raise RuntimeError(f"the function given to {whose} raised StopIteration") from error


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
