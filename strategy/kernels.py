"""Update rules, as in-place arithmetic on pieces that fit the cache. Pure.

Nothing is allocated: what lies between goes into scratch arrays. The gradient is only read: it lies
where the worker writes the next one, and writing to memory that another core has just changed takes
ten times as long (measured).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Elements of a piece of a rule with many passes: shorter ones lose more to the overhead of NumPy's
# calls than the cache gains; measured on float32.
_PIECE = 65536


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
    """How an optimizer changes a piece of a variable.

    Attributes:
        slots: Names of the arrays kept beside the variable, zero at first.
        scratch: How many scratch arrays it needs.
        piece: Elements that it is best given at once; None for whole blocks.
        update: Does it.
    """

    slots: tuple[str, ...]
    scratch: int
    piece: int | None
    update: Callable[[Piece], None]


def _assign(piece: Piece) -> None:
    np.copyto(piece.param, piece.grad)


def _add(piece: Piece) -> None:
    np.add(piece.param, piece.grad, out=piece.param)


def _sub(piece: Piece) -> None:
    np.subtract(piece.param, piece.grad, out=piece.param)


def _sgd(piece: Piece) -> None:
    """``param -= learning_rate * grad``."""
    (work,) = piece.scratch
    np.multiply(piece.grad, piece.values["learning_rate"], out=work)
    np.subtract(piece.param, work, out=piece.param)


def _adam(piece: Piece) -> None:
    """Kingma and Ba, arXiv 1412.6980, in the efficient form at the end of its section 2."""
    param, grad, values = piece.param, piece.grad, piece.values
    m, v = piece.slots
    work, square = piece.scratch
    beta_1, beta_2 = values["beta_1"], values["beta_2"]
    correction = math.sqrt(1.0 - beta_2**piece.step)
    rate = values["learning_rate"] * correction / (1.0 - beta_1**piece.step)
    np.multiply(m, beta_1, out=m)
    np.multiply(grad, 1.0 - beta_1, out=work)
    np.add(m, work, out=m)
    np.multiply(grad, grad, out=square)
    np.multiply(square, 1.0 - beta_2, out=square)
    np.multiply(v, beta_2, out=v)
    np.add(v, square, out=v)
    np.sqrt(v, out=work)
    np.add(work, values["epsilon"] * correction, out=work)
    np.divide(m, work, out=work)
    np.multiply(work, rate, out=work)
    np.subtract(param, work, out=param)


ASSIGN = Rule((), 0, None, _assign)
ADD = Rule((), 0, None, _add)
SUB = Rule((), 0, None, _sub)
OPTIMIZERS: Mapping[str, Rule] = {
    "SGD": Rule((), 1, None, _sgd),
    "Adam": Rule(("m", "v"), 2, _PIECE, _adam),
}
