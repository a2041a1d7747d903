"""Names, numbers and messages as users give them. Pure."""

from __future__ import annotations

import contextlib
from operator import index
from typing import Any

# What a protobuf message has room for.
_LAST_INDEX = 2**31 - 1


def text(value: Any, what: str) -> str:
    """Local. A name or an address as a str.

    Raises:
        TypeError: It is neither str nor bytes.
        ValueError: It is no text that can be sent, in UTF-8.
    """
    if not isinstance(value, str | bytes):
        raise TypeError(f"the {what} must be a string, not {value!r}")
    try:
        return value.decode() if isinstance(value, bytes) else value.encode().decode()
    except UnicodeError as error:
        raise ValueError(f"the {what} must be text in UTF-8, not {value!r}") from error


def whole_number(value: Any, what: str) -> int:
    """Local. A number as Python's; TypeError if it is none, not whole, or a bool."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return index(value)
    raise TypeError(f"the {what} must be a whole number, not {value!r}")


def index_of_task(value: Any, what: str) -> int:
    """Local. The index of a task; ``"7"`` and ``7.0`` are 7, as for TensorFlow.

    Args:
        value: What was given.
        what: What it is the index of, for messages.

    Raises:
        TypeError: It is no number.
        ValueError: It is not whole, or there is no such index.
    """
    try:
        number = int(value) if isinstance(value, str | bytes | float) else whole_number(value, what)
    except (ValueError, OverflowError):  # another text, NaN, infinity
        number = -1
    if not 0 <= number <= _LAST_INDEX or (isinstance(value, float) and value != number):
        raise ValueError(
            f"the {what} must be a whole number from 0 to {_LAST_INDEX}, not {value!r}"
        )
    return number


def is_message(value: Any, name: str) -> bool:
    """Local. Whether a value is a protobuf message of that name, ours or another library's."""
    if isinstance(value, type) or not hasattr(value, "SerializeToString"):
        return False
    return getattr(getattr(value, "DESCRIPTOR", None), "name", None) == name
