"""Scopes that name variables, and let them be found again; as TensorFlow's variable_scope."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


class Reuse(enum.Enum):
    """Whether a name may have been used before."""

    NEVER = 0
    ALWAYS = 1
    AUTO = 2


AUTO_REUSE = Reuse.AUTO
"""A variable is found if it exists, and made if not."""


@dataclass
class VariableScope:
    """A scope.

    Attributes:
        name: With those of the scopes around it.
        reuse: Whether names may have been used before.
    """

    name: str = ""
    reuse: Reuse = Reuse.NEVER

    def full_name(self, name: str) -> str:
        """Local. The name of a variable in this scope."""
        return f"{self.name}/{name}" if self.name else name

    def reuse_variables(self) -> None:
        """Local. From now on :func:`get_variable` finds variables in this scope, and makes none."""
        self.reuse = Reuse.ALWAYS


_scope: ContextVar[VariableScope | None] = ContextVar("variable_scope", default=None)


def get_variable_scope() -> VariableScope:
    """Local. The scope that is open; without one, a new one without a name."""
    return _scope.get() or VariableScope()


@contextmanager
def variable_scope(
    name: str | VariableScope, reuse: bool | Reuse | None = None
) -> Iterator[VariableScope]:
    """Local. In the block, names of variables begin with ``<name>/``.

    Args:
        name: Of the scope; may have slashes. Or a scope that was open before, to go on with: under
            its name, wherever that is, and with its ``reuse``.
        reuse: True: :func:`get_variable` finds variables, and makes none. :data:`AUTO_REUSE`: it
            finds or makes them. None or False: it makes them; but inside of a scope that reuses,
            all reuse.

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
