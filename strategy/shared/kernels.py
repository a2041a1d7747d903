"""How a server changes a variable, piece by piece: what a rule is, and the plain ones. Pure.

The gradient is only read: it lies where the worker writes the next one, and writing to memory that
another core has just changed takes ten times as long (measured).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Elements of a piece of a rule with many passes: shorter ones lose more to the overhead of NumPy's
# calls than the cache gains; measured on float32.
PIECE = 65536


@dataclass(slots=True)
class Piece:
    """What a rule works on.

    Attributes:
        param: Changed in place; flat, as all arrays here.
        grad: Of the length of ``param``; not to be changed.
        slots: What the rule keeps beside the variable, in the order of its names.
        scratch: For what lies between.
        values: The optimizer's numbers.
        step: Which update of this variable it is, from 1.
    """

    param: Array
    grad: Array
    slots: Sequence[Array]
    scratch: Sequence[Array]
    values: Mapping[str, float]
    step: int


@dataclass(frozen=True)
class Rule:
    """How a piece of a variable is changed.

    Attributes:
        slots: Names of the arrays kept beside the variable.
        scratch: How many scratch arrays it needs.
        piece: Elements that it is best given at once; None for whole blocks.
        update: Does it.
        initial: First values of the slots that are not zero at first.
        wide: Whether variables of half precision are changed, and kept beside, in float32: what a
            step adds is mostly less than the last digit of float16 and bfloat16.
        joins: Whether it changes each element by itself, so that what it is given may be several
            variables.
        kind: Name of the optimizer's class; nothing for changes that take only the values.
    """

    slots: tuple[str, ...]
    scratch: int
    piece: int | None
    update: Callable[[Piece], None]
    initial: Mapping[str, float] = field(default_factory=dict)
    wide: bool = False
    joins: bool = True
    kind: str = ""


def copy_scaled(target: Array, source: Array, scale: float) -> None:
    """Local. Copy an array, converted to the dtype of the target, and multiplied."""
    if scale == 1.0:
        np.copyto(target, source, casting="same_kind")
    else:  # not in the precision of halves or integers, where the factor may be nothing
        wide = np.result_type(source.dtype, target.dtype, np.float32)
        np.multiply(source, scale, out=target, dtype=wide, casting="unsafe")


def _assign(piece: Piece) -> None:
    np.copyto(piece.param, piece.grad)


def _plain(ufunc: np.ufunc) -> Rule:
    """The rule that puts the result of a ufunc in the place of the values."""

    def update(piece: Piece) -> None:
        ufunc(piece.param, piece.grad, out=piece.param)

    return Rule((), 0, None, update)


FUNCTION = "Function"
"""The kind of a user's rule."""

ASSIGN = Rule((), 0, None, _assign)
ADD, SUB, MUL, DIV = map(_plain, (np.add, np.subtract, np.multiply, np.divide))
MIN, MAX = map(_plain, (np.minimum, np.maximum))
