"""The update rules of the optimizers, as in-place arithmetic of NumPy on pieces. Pure.

Nothing is allocated: what lies between goes into scratch arrays. Each function makes the rule of
one optimizer from its numbers, of which the learning rate may differ from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from strategy.shared.kernels import PIECE, Array, Piece, Rule

Values = Mapping[str, float]

_rule = partial(Rule, wide=True)


def sgd(values: Values) -> Rule:
    """Local. ``param -= learning_rate * grad``, with momentum as torch and Keras have it."""
    momentum, nesterov = values["momentum"], values["nesterov"]

    def plain(piece: Piece) -> None:
        work = piece.scratch[0]
        np.multiply(_decayed(piece), piece.values["learning_rate"], out=work)
        np.subtract(piece.param, work, out=piece.param)

    def with_momentum(piece: Piece) -> None:
        work, grad = piece.scratch[0], _decayed(piece)
        (velocity,) = piece.slots
        np.multiply(velocity, momentum, out=velocity)
        np.add(velocity, grad, out=velocity)
        direction = velocity
        if nesterov:
            # Where the next step would begin (Sutskever et al., ICML 2013, as rewritten by Keras).
            direction = piece.scratch[2]
            np.multiply(velocity, momentum, out=direction)
            np.add(direction, grad, out=direction)
        np.multiply(direction, piece.values["learning_rate"], out=work)
        np.subtract(piece.param, work, out=piece.param)

    if momentum:
        return _rule(("momentum",), 3, PIECE, with_momentum, kind="SGD")
    return _rule((), 2, None, plain, kind="SGD")


def adagrad(values: Values) -> Rule:
    """Local. Duchi, Hazan and Singer, JMLR 12, 2011."""
    epsilon = values["epsilon"]

    def update(piece: Piece) -> None:
        work, grad = piece.scratch[0], _decayed(piece)
        (squares,) = piece.slots
        np.multiply(grad, grad, out=work)
        np.add(squares, work, out=squares)
        np.sqrt(squares, out=work)
        np.add(work, epsilon, out=work)
        np.divide(grad, work, out=work)
        np.multiply(work, piece.values["learning_rate"], out=work)
        np.subtract(piece.param, work, out=piece.param)

    initial = {"accumulator": values["initial_accumulator_value"]}
    return _rule(("accumulator",), 2, PIECE, update, initial, kind="Adagrad")


def rmsprop(values: Values) -> Rule:
    """Local. Tieleman and Hinton, 2012; centred: Graves, arXiv 1308.0850, equations 38 to 45."""
    rho, momentum, epsilon = values["rho"], values["momentum"], values["epsilon"]
    centered = bool(values["centered"])

    def update(piece: Piece) -> None:
        work, grad = piece.scratch[0], _decayed(piece)
        slots = iter(piece.slots)
        squares = next(slots)
        np.multiply(grad, grad, out=work)
        _decay(squares, work, rho)
        if centered:
            mean = next(slots)
            np.copyto(work, grad)
            _decay(mean, work, rho)
            np.multiply(mean, mean, out=work)
            np.subtract(squares, work, out=work)
            np.maximum(work, 0, out=work)  # of equal gradients it is zero but for rounding
            np.sqrt(work, out=work)
        else:
            np.sqrt(squares, out=work)
        np.add(work, epsilon, out=work)
        np.divide(grad, work, out=work)
        if momentum:
            velocity = next(slots)
            np.multiply(velocity, momentum, out=velocity)
            np.add(velocity, work, out=velocity)
            np.copyto(work, velocity)
        np.multiply(work, piece.values["learning_rate"], out=work)
        np.subtract(piece.param, work, out=piece.param)

    kept = ("squares", *(("mean",) * centered), *(("momentum",) * bool(momentum)))
    return _rule(kept, 2, PIECE, update, kind="RMSprop")


def adam(values: Values) -> Rule:
    """Local. Kingma and Ba, arXiv 1412.6980, in the efficient form at the end of its section 2."""

    def update(piece: Piece) -> None:
        _adam_step(piece, _decayed(piece))

    return _rule(("m", "v"), 2, PIECE, update, kind="Adam")


def adamw(values: Values) -> Rule:
    """Local. Loshchilov and Hutter, arXiv 1711.05101: the decay is no part of the gradient."""
    decay = values["weight_decay"]

    def update(piece: Piece) -> None:
        if decay:
            shrink = 1.0 - piece.values["learning_rate"] * decay
            np.multiply(piece.param, shrink, out=piece.param)
        _adam_step(piece, piece.grad)

    return _rule(("m", "v"), 2, PIECE, update, kind="AdamW")


def adam_rates(values: Values, step: int) -> tuple[float, float]:
    """Local. The corrected learning rate and epsilon of a step."""
    correction = math.sqrt(1.0 - values["beta_2"] ** step)
    rate = values["learning_rate"] * correction / (1.0 - values["beta_1"] ** step)
    return rate, values["epsilon"] * correction


def ftrl(values: Values) -> Rule:
    """Local. McMahan et al., "Ad Click Prediction", KDD 2013, algorithm 1 with the power 1/2.

    A learning rate of zero changes nothing, as it does nothing in the other rules.
    """
    l1, l2, shrinkage, beta = (
        values[name] for name in ("l1", "l2", "l2_shrinkage", "beta")
    )  # fmt: skip

    def update(piece: Piece) -> None:
        param, grad, rate = piece.param, piece.grad, piece.values["learning_rate"]
        if not rate:
            return
        squares, linear = piece.slots
        work, root, before = piece.scratch
        np.sqrt(squares, out=before)
        np.multiply(grad, grad, out=work)
        np.add(squares, work, out=squares)
        np.sqrt(squares, out=root)
        # linear += grad + 2 shrinkage param - (root - before) / rate * param
        np.subtract(root, before, out=before)
        np.divide(before, rate, out=before)
        np.subtract(before, 2.0 * shrinkage, out=before)
        np.multiply(before, param, out=before)
        np.subtract(grad, before, out=before)
        np.add(linear, before, out=linear)
        # param = (clip(linear, -l1, l1) - linear) / ((beta + root) / rate + 2 l2)
        np.add(root, beta, out=root)
        np.divide(root, rate, out=root)
        np.add(root, 2.0 * l2, out=root)
        np.maximum(root, np.finfo(root.dtype).tiny, out=root)  # where all gradients were zero
        np.clip(linear, -l1, l1, out=work)
        np.subtract(work, linear, out=work)
        np.divide(work, root, out=param)

    initial = {"accumulator": values["initial_accumulator_value"]}
    return _rule(("accumulator", "linear"), 3, PIECE, update, initial, kind="Ftrl")


RULES: Mapping[str, Callable[[Values], Rule]] = {
    "SGD": sgd,
    "Adagrad": adagrad,
    "RMSprop": rmsprop,
    "Adam": adam,
    "AdamW": adamw,
    "Ftrl": ftrl,
}
"""By the name of the optimizer's class, what makes its rule from its numbers."""


def _decayed(piece: Piece) -> Array:
    """The gradient with that of the weights' squares; in the second scratch array."""
    decay = piece.values["weight_decay"]
    if not decay:
        return piece.grad
    total = piece.scratch[1]
    np.multiply(piece.param, decay, out=total)
    np.add(total, piece.grad, out=total)
    return total


def _decay(average: Array, new: Array, rho: float) -> None:
    """``average = rho * average + (1 - rho) * new``; what is new is lost."""
    np.multiply(average, rho, out=average)
    np.multiply(new, 1.0 - rho, out=new)
    np.add(average, new, out=average)


def _adam_step(piece: Piece, grad: Array) -> None:
    param, values = piece.param, piece.values
    m, v = piece.slots
    work = piece.scratch[0]
    rate, epsilon = adam_rates(values, piece.step)
    np.multiply(grad, grad, out=work)
    _decay(v, work, values["beta_2"])
    np.multiply(m, values["beta_1"], out=m)
    np.multiply(grad, 1.0 - values["beta_1"], out=work)
    np.add(m, work, out=m)
    np.sqrt(v, out=work)
    np.add(work, epsilon, out=work)
    np.divide(m, work, out=work)
    np.multiply(work, rate, out=work)
    np.subtract(param, work, out=param)
