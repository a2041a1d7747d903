"""What becomes of the values that several replicas give one variable; TensorFlow's names."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

E = TypeVar("E", bound=enum.Enum)


class VariableAggregation(enum.Enum):
    """How values of several replicas become one, when all assign to a variable."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(enum.Enum):
    """When copies of a variable are made alike. Here there is one copy, and all mean the same."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


def member(kind: type[E], value: Any) -> E:
    """Local. The member meant by itself, its name in either case of letters, or None: the first.

    Raises:
        ValueError: There is none.
    """
    if value is None:
        return next(iter(kind))
    if isinstance(value, kind):
        return value
    try:
        # Members of TensorFlow's own classes have the same names.
        return kind[str(getattr(value, "name", value)).upper()]
    except KeyError:
        known = ", ".join(kind.__members__)
        raise ValueError(f"unknown {kind.__name__} {value!r}; the known ones are {known}") from None
