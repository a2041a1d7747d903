"""Options for variables that several replicas assign to, with TensorFlow's names."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

E = TypeVar("E", bound=enum.Enum)


class VariableAggregation(enum.Enum):
    """The way to combine the values that all replicas of a worker assign to a variable."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class VariableSynchronization(enum.Enum):
    """The time at which copies of a variable are synchronized.

    The option has no effect on values, because a variable has one copy. ON_READ makes the variable
    not trainable.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


def member(kind: type[E], value: Any) -> E:
    """Return a member of an enum.

    Args:
        kind: The enum.
        value: A member, its name in upper or lower case, or None for the first member.

    Raises:
        ValueError: The name is unknown.
    """
    if value is None:
        return next(iter(kind))
    if isinstance(value, kind):
        return value
    try:
        # Members of TensorFlow's enums have the same names.
        return kind[str(getattr(value, "name", value)).upper()]
    except KeyError:
        known = ", ".join(kind.__members__)
        raise ValueError(f"unknown {kind.__name__} {value!r}; the known ones are {known}") from None
