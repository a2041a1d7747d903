"""The update rule of a variable, and the rules of assign, add and the like.

The gradient is only read. It lies in memory into which the worker writes the next one, and writing
to memory that another core has just changed takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

TILE = 15360
"""Elements that NumPy's rules update at once.

Temporary arrays of float64 then stay below 128 KiB. Above, malloc maps new pages for each array,
and the page faults make updates ten times slower. Shorter tiles lose more to the overhead of calls.
"""


@dataclass(slots=True)
class Update:
    """The arrays and numbers of one call of a rule.

    Attributes:
        param: Values of the variable, flat, as all arrays here; changed in place.
        grad: The gradient, as long as ``param``; read only.
        slots: The optimizer's arrays beside the variable, in the order of :attr:`Rule.slots`.
        numbers: The numbers of this step; see :meth:`strategy.optimizers.Optimizer.numbers`.
    """

    param: Array
    grad: Array
    slots: Sequence[Array]
    numbers: Sequence[float]


class Kind(Enum):
    """Kinds of rules."""

    PLAIN = "plain"
    """Assign, add and the like: no slots, in the dtype of the variable."""
    OPTIMIZER = "optimizer"
    """Elementwise, so several variables may be updated by one call."""
    FUNCTION = "function"
    """A user's function."""


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Optimizers and functions update variables of float16 and bfloat16 in float32: a step is often
    less than the last digit of the halves.

    Attributes:
        apply: Makes an update. Takes arrays of NumPy and of CuPy.
        kind: See :class:`Kind`.
        slots: Names of the arrays that the rule keeps beside the variable.
        initial: First values of slots that do not begin with 0.
        compiled: The same as ``apply``, compiled; NumPy arrays only. None without numba.
    """

    apply: Callable[[Update], None]
    kind: Kind = Kind.PLAIN
    slots: tuple[str, ...] = ()
    initial: Mapping[str, float] = field(default_factory=dict)
    compiled: Callable[[Update], None] | None = None

    @property
    def on_host(self) -> Callable[[Update], None]:
        """The faster of the two forms for NumPy arrays."""
        return self.apply if self.compiled is None else self.compiled

    @property
    def tile(self) -> int | None:
        """The number of elements to update at once on the host; None for any number."""
        return None if self.kind is Kind.PLAIN or self.compiled is not None else TILE


FoundRule = tuple[str, Rule, Sequence[float]]
"""The name for slots and steps, the rule, and the numbers of the rule for one step."""


def _assign(update: Update) -> None:
    np.copyto(update.param, update.grad)


def _plain(ufunc: np.ufunc) -> Rule:
    """Return the rule that replaces the values by the result of a ufunc."""

    def apply(update: Update) -> None:
        ufunc(update.param, update.grad, out=update.param)

    return Rule(apply)


ASSIGN = Rule(_assign)
ADD, SUB, MUL, DIV = map(_plain, (np.add, np.subtract, np.multiply, np.divide))
MIN, MAX = map(_plain, (np.minimum, np.maximum))
