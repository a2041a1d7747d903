"""Checks of arguments that must be integers."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(**named: Any) -> int:
    """Return the integer of one keyword argument. Raise TypeError if it is not an integer."""
    ((name, value),) = named.items()
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
