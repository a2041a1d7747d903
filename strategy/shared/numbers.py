"""Arguments that must be whole numbers."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(**named: Any) -> int:
    """Local. The number, given by its name; TypeError if it is none, or not whole."""
    ((name, value),) = named.items()
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
