"""Checks of users' arguments."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


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
