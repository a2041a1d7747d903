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
    """Return an argument, which may be NumPy's, as a Python int.

    Args:
        method: The method of the dataset, for messages.
        name: The name of the argument, for messages.
        value: The argument.

    Raises:
        TypeError: It is not a whole number.
    """
    with suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)
    raise TypeError(f"{method} needs a whole number as {name}, not {value!r}")


def whole_or_none(method: str, name: str, value: Any) -> int | None:
    """Return an argument that may be None as :func:`whole` does."""
    return None if value is None else whole(method, name, value)


def wholes(method: str, name: str, values: Any) -> tuple[int, ...]:
    """Return several numbers as :func:`whole` does."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{method} needs whole numbers as {name}, not {values!r}")
    return tuple(whole(method, name, value) for value in values)


def only_one(method: str, **given: Any) -> Any:
    """Return an argument that has several names. Raise TypeError if more than one is used."""
    used = {name: value for name, value in given.items() if value is not None}
    if len(used) > 1:
        raise TypeError(f"{method} takes only one of {' and '.join(used)}, which mean the same")
    return next(iter(used.values()), None)


def check_callable(method: str, name: str, value: Any) -> Any:
    """Return an argument. Raise TypeError if it cannot be called."""
    if not callable(value):
        raise TypeError(f"{method} needs a function as {name}, not {value!r}")
    return value


def check_path(method: str, name: str, value: Any) -> str:
    """Return an argument as the text of a path. Raise TypeError if it is not a path."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{method} needs a path as {name}, not {value!r}") from None


def check_numbers(method: str, name: str, values: Any) -> list[float]:
    """Return an argument as a list of numbers. Raise TypeError if it is not one."""
    with suppress(TypeError, ValueError):
        # An endless dataset has no length, and no list can be made of it.
        if len(values) >= 0 and not isinstance(values, str | bytes):
            return [float(value) for value in values]
    raise TypeError(f"{method} needs a list of numbers as {name}, not {values!r}")


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def call(function: Callable[..., Any], element: Any, method: str) -> Any:
    """Call a user's function with an element.

    Args:
        function: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        method: Name of the transformation, for messages.

    Raises:
        RuntimeError: It raised StopIteration, which would end the sequence silently.
        Exception: The error of the function.
    """
    try:
        return function(*element) if type(element) is tuple else function(element)
    except StopIteration as error:
        raise RuntimeError(f"the function given to {method} raised StopIteration") from error


_BOOLS = (bool, np.bool_)


def call_predicate(predicate: Callable[..., Any], element: Any, method: str) -> bool:
    """Call a user's predicate with an element.

    Args:
        predicate: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        method: Name of the transformation, for messages.

    Raises:
        InvalidArgumentError: It returned neither a bool nor a whole number.
        Exception: As :func:`call`.
    """
    answer = call(predicate, element, method)
    if isinstance(answer, _BOOLS):
        return bool(answer)
    answer = tree.on_host(answer)
    if isinstance(answer, int) or hasattr(answer, "__array__"):
        array = np.asarray(answer)
        if array.ndim == 0 and array.dtype.kind in "biu":
            return bool(array)
    raise _wrong(predicate, method, answer, "a bool")


def call_int(function: Callable[..., Any], element: Any, method: str) -> int:
    """Call a user's function that returns a whole number with an element.

    Args:
        function: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        method: Name of the transformation, for messages.

    Raises:
        InvalidArgumentError: It returned something else.
        Exception: As :func:`call`.
    """
    answer = tree.on_host(call(function, element, method))
    try:
        return whole(method, "answer", answer)
    except TypeError:
        raise _wrong(function, method, answer, "a whole number") from None


def _wrong(
    function: Callable[..., Any], method: str, answer: Any, wanted: str
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the function {name_of(function)} given to {method} returned {answer!r}: it must return "
        f"{wanted}"
    )
