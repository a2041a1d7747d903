"""Scopes for the names and the reuse of variables, like TensorFlow's variable_scope."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


class Reuse(enum.Enum):
    """The rule of a scope for existing variables: never, always or automatic reuse."""

    NEVER = 0
    ALWAYS = 1
    AUTO = 2


AUTO_REUSE = Reuse.AUTO
"""Return a variable if it exists, and create it otherwise."""


@dataclass
class VariableScope:
    """A scope for the names of variables.

    Attributes:
        name: Full name, with the names of the scopes around this scope.
        reuse: The rule for existing variables.
    """

    name: str = ""
    reuse: Reuse = Reuse.NEVER

    def full_name(self, name: str) -> str:
        """Return the full name of a variable in this scope."""
        return f"{self.name}/{name}" if self.name else name

    def reuse_variables(self) -> None:
        """Make :func:`get_variable` return only existing variables of this scope from now on."""
        self.reuse = Reuse.ALWAYS


_scope: ContextVar[VariableScope | None] = ContextVar("variable_scope", default=None)


def get_variable_scope() -> VariableScope:
    """Return the open scope. Without an open scope, return a new scope without a name."""
    return _scope.get() or VariableScope()


@contextmanager
def variable_scope(
    name: str | VariableScope, reuse: bool | Reuse | None = None
) -> Iterator[VariableScope]:
    """Prefix the names of variables that are created in the block with ``<name>/``.

    Args:
        name: Name of the scope, which may have slashes. Or an earlier scope, which is opened again
            with its full name, independent of the scopes around the block, and with its ``reuse``.
        reuse: With True, :func:`get_variable` returns existing variables and creates none. With
            :data:`AUTO_REUSE`, it returns or creates variables. With None or False, it creates
            variables, unless the outer scope reuses variables: then the inner scope does, too.

    Yields:
        The scope.

    Raises:
        ValueError: The name is empty or has a colon.
    """
    outer = get_variable_scope()
    if isinstance(name, VariableScope):
        outer, full_name = name, name.name
    elif not name or ":" in name:
        raise ValueError(f"a variable scope needs a name without ':', not {name!r}")
    else:
        full_name = outer.full_name(name)
    asked = reuse if isinstance(reuse, Reuse) else Reuse.ALWAYS if reuse else Reuse.NEVER
    inherits = asked is Reuse.NEVER and outer.reuse is not Reuse.NEVER
    inner = VariableScope(full_name, outer.reuse if inherits else asked)
    token = _scope.set(inner)
    try:
        yield inner
    finally:
        _scope.reset(token)
