"""Checks of what users give to the methods of a dataset, where they give it. Pure."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


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


def path(method: str, name: str, value: Any) -> str:
    """Local. An argument as the text of a path; TypeError if it is none."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(f"{method} needs a path as {name}, not {value!r}") from None


def numbers(method: str, name: str, values: Any) -> list[float]:
    """Local. An argument as a list of numbers; TypeError if it is none."""
    with suppress(TypeError, ValueError):
        # An endless dataset has no length, and no list can be made of it.
        if len(values) >= 0 and not isinstance(values, str | bytes):
            return [float(value) for value in values]
    raise TypeError(f"{method} needs a list of numbers as {name}, not {values!r}")
