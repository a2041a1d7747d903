"""The update rules of the optimizers, each one pass over its arrays, compiled by numba. Pure.

They take the same steps as those of :mod:`strategy.shared.rules`, element by element, so that the
results are the same to the last bit. A pass reads and writes each array once, where NumPy's many
passes over a piece wait for its caches. Needs the extra ``fast``; compiled code is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mpidist.buffers.compiling import compiled, compiled_fence
from strategy.shared.kernels import Array, Piece, Rule
from strategy.shared.rules import RULES, Values, adam_rates

_fence = compiled_fence()


def fused(kind: str, values: Values) -> Rule:
    """Local. The rule of an optimizer.

    Args:
        kind: One of :data:`strategy.shared.rules.RULES`.
        values: The optimizer's numbers.
    """
    plain = RULES[kind](values)
    update = partial(_UPDATES[kind], plain.slots)
    return replace(plain, scratch=0, piece=None, update=update)


@compiled
def _sgd(param: Any, grad: Any, rate: Any, decay: Any) -> None:
    for i in range(param.size):
        param[i] -= (param[i] * decay + grad[i] if decay != 0 else grad[i]) * rate


@compiled
def _momentum(
    param: Any, grad: Any, velocity: Any, rate: Any, decay: Any, momentum: Any, nesterov: bool
) -> None:
    for i in range(param.size):
        g = param[i] * decay + grad[i] if decay != 0 else grad[i]
        velocity[i] = velocity[i] * momentum + g
        direction = velocity[i] * momentum + g if nesterov else velocity[i]
        param[i] -= direction * rate


@compiled
def _adagrad(param: Any, grad: Any, squares: Any, rate: Any, decay: Any, epsilon: Any) -> None:
    for i in range(param.size):
        g = param[i] * decay + grad[i] if decay != 0 else grad[i]
        squares[i] += g * g
        param[i] -= g / (np.sqrt(squares[i]) + epsilon) * rate


@compiled
def _rmsprop(
    param: Any, grad: Any, squares: Any, mean: Any, velocity: Any, rate: Any, decay: Any,
    epsilon: Any, rho: Any, rest: Any, momentum: Any,
) -> None:  # fmt: skip
    centered, moving = mean.size > 0, velocity.size > 0
    for i in range(param.size):
        g = param[i] * decay + grad[i] if decay != 0 else grad[i]
        squares[i] = squares[i] * rho + g * g * rest
        spread = squares[i]
        if centered:
            mean[i] = mean[i] * rho + g * rest
            spread = max(spread - mean[i] * mean[i], spread - spread)
        step = g / (np.sqrt(spread) + epsilon)
        if moving:
            step += velocity[i] * momentum
            velocity[i] = step
        param[i] -= step * rate


@compiled
def _adam(
    param: Any, grad: Any, m: Any, v: Any, rate: Any, decay: Any, shrink: Any, epsilon: Any,
    beta_1: Any, rest_1: Any, beta_2: Any, rest_2: Any,
) -> None:  # fmt: skip
    for i in range(param.size):
        p = param[i] * shrink
        g = p * decay + grad[i] if decay != 0 else grad[i]
        v[i] = v[i] * beta_2 + g * g * rest_2
        m[i] = m[i] * beta_1 + g * rest_1
        param[i] = p - m[i] / (np.sqrt(v[i]) + epsilon) * rate


@compiled
def _ftrl(
    param: Any, grad: Any, squares: Any, linear: Any, rate: Any, beta: Any, l1: Any, l2: Any,
    shrinkage: Any, least: Any,
) -> None:  # fmt: skip
    for i in range(param.size):
        before = np.sqrt(squares[i])
        squares[i] += grad[i] * grad[i]
        root = np.sqrt(squares[i])
        linear[i] += grad[i] - ((root - before) / rate - shrinkage) * param[i]
        clipped = min(max(linear[i], -l1), l1)
        param[i] = (clipped - linear[i]) / max((root + beta) / rate + l2, least)


@compiled
def _descend(versions: Any, param: Any, grad: Any, rate: Any, decay: Any, step: int) -> None:
    for block in range(versions.size):
        here = slice(block * step, (block + 1) * step)
        versions[block] += 1
        _fence()
        _sgd(param[here], grad[here], rate, decay)
        _fence()
        versions[block] += 1


def descend(versions: Array, param: Array, grad: Array, rate: Any, step: int) -> None:
    """Local. Subtract a gradient times a learning rate, block by block, each odd meanwhile.

    Args:
        versions: Of the blocks.
        param: Flat, float32 or float64; changed in place.
        grad: Of the same length and dtype.
        rate: Of the same dtype.
        step: Elements of a block.
    """
    _descend(versions, param, grad, rate, param.dtype.type(0), step)


def _update_sgd(slots: tuple[str, ...], piece: Piece) -> None:
    rate, decay = _numbers(piece, "learning_rate", "weight_decay")
    if slots:
        (momentum,) = _numbers(piece, "momentum")
        nesterov = bool(piece.values["nesterov"])
        _momentum(piece.param, piece.grad, *piece.slots, rate, decay, momentum, nesterov)
    else:
        _sgd(piece.param, piece.grad, rate, decay)


def _update_adagrad(slots: tuple[str, ...], piece: Piece) -> None:
    numbers = _numbers(piece, "learning_rate", "weight_decay", "epsilon")
    _adagrad(piece.param, piece.grad, *piece.slots, *numbers)


def _update_rmsprop(slots: tuple[str, ...], piece: Piece) -> None:
    kept = dict(zip(slots, piece.slots, strict=True))
    nothing: Array = piece.param[:0]
    arrays = [kept.get(name, nothing) for name in ("squares", "mean", "momentum")]
    numbers = _numbers(piece, "learning_rate", "weight_decay", "epsilon", "rho")
    rest, momentum = _cast(piece, 1.0 - piece.values["rho"], piece.values["momentum"])
    _rmsprop(piece.param, piece.grad, *arrays, *numbers, rest, momentum)


def _update_adam(
    slots: tuple[str, ...], piece: Piece, *, decay: float = 0.0, shrink: float = 1.0
) -> None:
    rate, epsilon = adam_rates(piece.values, piece.step)
    beta_1, beta_2 = piece.values["beta_1"], piece.values["beta_2"]
    numbers = (rate, decay, shrink, epsilon, beta_1, 1.0 - beta_1, beta_2, 1.0 - beta_2)
    _adam(piece.param, piece.grad, *piece.slots, *_cast(piece, *numbers))


def _update_adam_with_decay(slots: tuple[str, ...], piece: Piece) -> None:
    _update_adam(slots, piece, decay=piece.values["weight_decay"])


def _update_adamw(slots: tuple[str, ...], piece: Piece) -> None:
    values = piece.values
    _update_adam(slots, piece, shrink=1.0 - values["learning_rate"] * values["weight_decay"])


def _update_ftrl(slots: tuple[str, ...], piece: Piece) -> None:
    values = piece.values
    if not values["learning_rate"]:
        return
    others = (2.0 * values["l2"], 2.0 * values["l2_shrinkage"], np.finfo(piece.param.dtype).tiny)
    numbers = (*_numbers(piece, "learning_rate", "beta", "l1"), *_cast(piece, *others))
    _ftrl(piece.param, piece.grad, *piece.slots, *numbers)


_UPDATES: Mapping[str, Callable[[tuple[str, ...], Piece], None]] = {
    "SGD": _update_sgd,
    "Adagrad": _update_adagrad,
    "RMSprop": _update_rmsprop,
    "Adam": _update_adam_with_decay,
    "AdamW": _update_adamw,
    "Ftrl": _update_ftrl,
}


def _numbers(piece: Piece, *names: str) -> list[Any]:
    """Numbers of the optimizer, in the type of the variable, as NumPy's arithmetic has them."""
    return _cast(piece, *[piece.values[name] for name in names])


def _cast(piece: Piece, *numbers: float) -> list[Any]:
    kind = piece.param.dtype.type
    return [kind(number) for number in numbers]
