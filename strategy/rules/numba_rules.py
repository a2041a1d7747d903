"""Formulas of optimizers element by element, compiled by numba. Needs the extra ``fast``.

A compiled loop reads and writes each array once, where NumPy makes a pass for each operation. The
results are the same to the last bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from mpidist.buffers.compiling import compiled
from strategy.rules.numpy_rules import Formula, in_dtype
from strategy.rules.rule import Update


def element_by_element(formula: Formula, slots: int) -> Callable[[Update], None]:
    """Return the update by a formula as a compiled loop over the elements.

    Args:
        formula: See :data:`strategy.rules.numpy_rules.Formula`; a function of a module.
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
    that file changes. After a change of the text below, change :mod:`strategy.optimizers`, too.
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
