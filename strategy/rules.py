"""Update rules of variables: assign, add and the like, and the formulas of optimizers.

A formula runs in two forms, with equal results to the last bit: on whole arrays of NumPy or CuPy,
and element by element in a loop that numba compiles (extra ``fast``). The loop reads and writes
each array once, where NumPy makes a pass for each operation. Formulas of rules of
:attr:`Kind.WHOLE` have only the form on whole arrays.

Rules only read the gradient. The worker writes its next gradient to the same memory, and writes to
memory that another core has just changed take ten times as long.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist.buffers.compiling import compiled

Array = NDArray[Any]
Shape = tuple[int, ...]

TILE = 15360
"""Elements that NumPy's rules update at once.

Temporary arrays of float64 then stay below 128 KiB. Above, malloc maps new pages for each array,
and the page faults make updates ten times slower. Shorter tiles lose more to the overhead of calls.
"""


@dataclass(slots=True)
class Update:
    """The arrays and numbers of one call of a rule.

    Attributes:
        param: Values of the variable, changed in place. All arrays are flat, but for rules of
            :attr:`Kind.WHOLE`, which get the arrays in their shapes.
        grad: The gradient, of the shape of ``param``; read only.
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
    """Assign, add and similar operations: no slots, in the dtype of the variable."""
    OPTIMIZER = "optimizer"
    """Elementwise, so several variables may be updated by one call."""
    FUNCTION = "function"
    """A user's function."""
    WHOLE = "whole"
    """A formula that needs all elements of a variable at once."""


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Optimizers and functions update variables of float16 and bfloat16 in float32, because a step is
    often smaller than the precision of these dtypes.

    Attributes:
        apply: The function that makes an update of NumPy or CuPy arrays.
        kind: See :class:`Kind`.
        slots: Names of the arrays that the rule keeps beside the variable.
        initial: First values of slots that do not begin with 0.
        compiled: ``apply`` compiled by numba, for NumPy arrays only. None without numba.
        slot_shapes: Returns the shapes of the slots for the shape of a variable. None if slots have
            the shape of the variable. Only for rules of :attr:`Kind.WHOLE`.
    """

    apply: Callable[[Update], None]
    kind: Kind = Kind.PLAIN
    slots: tuple[str, ...] = ()
    initial: Mapping[str, float] = field(default_factory=dict)
    compiled: Callable[[Update], None] | None = None
    slot_shapes: Callable[[Shape], Sequence[Shape]] | None = None

    def shapes_of_slots(self, shape: Shape) -> Sequence[Shape]:
        """Return the shape of each slot for the shape of a variable."""
        return [shape] * len(self.slots) if self.slot_shapes is None else self.slot_shapes(shape)

    @property
    def on_host(self) -> Callable[[Update], None]:
        """The faster of ``apply`` and ``compiled`` for NumPy arrays."""
        return self.apply if self.compiled is None else self.compiled

    @property
    def tile(self) -> int | None:
        """The number of elements to update at once on the host; None for any number."""
        any_size = self.kind in (Kind.PLAIN, Kind.WHOLE) or self.compiled is not None
        return None if any_size else TILE


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


Formula = Callable[..., tuple[Any, ...]]
"""Returns the new values of a variable and of its slots.

Called as ``formula(param, grad, *slots, *numbers)``, either with arrays or with single elements.
Formulas of rules of :attr:`Kind.WHOLE` are called with arrays only. A formula uses operators and
NumPy's functions, and conditions on the numbers only.
"""


def on_arrays(formula: Formula) -> Callable[[Update], None]:
    """Return the update by a formula. The arrays are of NumPy, or all of CuPy on one GPU."""

    def apply(update: Update) -> None:
        targets = (update.param, *update.slots)
        results = formula(
            update.param, update.grad, *update.slots, *in_dtype(update.numbers, update.param.dtype)
        )
        for target, result in zip(targets, results, strict=True):
            target[...] = result

    return apply


def in_dtype(numbers: Sequence[float], dtype: np.dtype[Any]) -> list[Any]:
    """Return numbers as scalars of a dtype, so that they do not widen arrays."""
    return [dtype.type(number) for number in numbers]


def element_by_element(formula: Formula, slots: int) -> Callable[[Update], None]:
    """Return the update by a formula as a compiled loop over the elements.

    Args:
        formula: See :data:`strategy.rules.Formula`; a function of a module.
        slots: The number of its slots.
    """
    loop = _loop(formula, slots)

    def apply(update: Update) -> None:
        numbers = in_dtype(update.numbers, update.param.dtype)
        loop(update.param, update.grad, *update.slots, *numbers)

    return apply


@cache
def _loop(formula: Formula, slots: int) -> Callable[..., None]:
    """Compile a loop with the arguments of the formula, since numba needs their number.

    The loop has the file name of the formula, so numba caches it on disk and compiles it again when
    that file changes. If you change the text below, change :mod:`strategy.optimizers`, too.
    """
    names = list(inspect.signature(formula).parameters)
    elements = [f"{name}[i]" for name in names[: 2 + slots]]
    targets = [elements[0], *elements[2:]]
    text = (
        f"def {formula.__name__}_loop({', '.join(names)}):\n"
        f"    for i in range({names[0]}.size):\n"
        f"        {', '.join(targets)}, = formula({', '.join([*elements, *names[2 + slots :]])})\n"
    )
    namespace: dict[str, Any] = {"formula": compiled(formula), "__name__": formula.__module__}
    exec(compile(text, inspect.getfile(formula), "exec"), namespace)
    return compiled(namespace[f"{formula.__name__}_loop"])
