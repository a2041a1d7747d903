"""Optimizers: what a worker says of them. The arithmetic runs on the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from strategy.optimizer import Applied, Optimizer, not_negative, part, positive
from strategy.proto import parameter_server_pb2 as pb
from strategy.schedules import Schedule

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Applied",
    "Ftrl",
    "Function",
    "Optimizer",
    "RMSprop",
]


class SGD(Optimizer):
    """Stochastic gradient descent: ``variable -= learning_rate * gradient``.

    With momentum, ``velocity = momentum * velocity + gradient`` takes the gradient's place; with
    Nesterov's, ``momentum * velocity + gradient`` does.

    Args:
        learning_rate: See :class:`Optimizer`.
        momentum: In [0, 1).
        nesterov: Whether it is Nesterov's.
        weight_decay: This times the variable is added to the gradient.
        kwargs: See :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if nesterov and not momentum:
            raise ValueError("nesterov needs a momentum")
        super().__init__(
            learning_rate,
            {
                "momentum": part(momentum=momentum),
                "nesterov": bool(nesterov),
                "weight_decay": not_negative(weight_decay=weight_decay),
            },
            **kwargs,
        )

    def _rate_alone(self) -> float | None:
        values = self.values
        plain = not (values["momentum"] or values["weight_decay"])
        return values.get("learning_rate") if plain else None


class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011).

    Args:
        learning_rate: See :class:`Optimizer`.
        initial_accumulator_value: Of the sums of squares; not negative.
        epsilon: Positive; added to the root of the sums.
        weight_decay: This times the variable is added to the gradient.
        kwargs: See :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            {
                "initial_accumulator_value": not_negative(
                    initial_accumulator_value=initial_accumulator_value
                ),
                "epsilon": positive(epsilon=epsilon),
                "weight_decay": not_negative(weight_decay=weight_decay),
            },
            **kwargs,
        )


class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton, 2012).

    Args:
        learning_rate: See :class:`Optimizer`.
        rho: Decay of the squares, in [0, 1).
        momentum: Of the steps, in [0, 1).
        epsilon: Positive; added to the root of the squares.
        centered: Whether the mean is taken out of the squares (Graves, arXiv 1308.0850).
        weight_decay: This times the variable is added to the gradient.
        kwargs: See :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        weight_decay: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            {
                "rho": part(rho=rho),
                "momentum": part(momentum=momentum),
                "epsilon": positive(epsilon=epsilon),
                "centered": bool(centered),
                "weight_decay": not_negative(weight_decay=weight_decay),
            },
            **kwargs,
        )


class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980).

    Args:
        learning_rate: See :class:`Optimizer`.
        beta_1: Decay of the mean, in [0, 1).
        beta_2: Decay of the squares, in [0, 1).
        epsilon: Positive; added to the root of the corrected squares.
        weight_decay: This times the variable is added to the gradient.
        kwargs: See :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            {
                "beta_1": part(beta_1=beta_1),
                "beta_2": part(beta_2=beta_2),
                "epsilon": positive(epsilon=epsilon),
                "weight_decay": not_negative(weight_decay=weight_decay),
            },
            **kwargs,
        )


class AdamW(Adam):
    """Adam with a weight decay of its own (Loshchilov and Hutter, arXiv 1711.05101).

    Arguments as :class:`Adam`, but that each step takes ``learning_rate * weight_decay`` of the
    variable away from it.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float = 0.004,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, weight_decay, **kwargs)


class Ftrl(Optimizer):
    """Follow the regularized leader (McMahan et al., KDD 2013), with learning rate power -1/2.

    Args:
        learning_rate: See :class:`Optimizer`.
        initial_accumulator_value: Of the sums of squares; not negative.
        l1: L1 regularization, not negative.
        l2: L2 regularization, not negative.
        l2_shrinkage: L2 regularization of the gradient alone, not negative.
        beta: Added to the root of the sums, not negative.
        kwargs: See :class:`Optimizer`.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        l2_shrinkage: float = 0.0,
        beta: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            {
                "initial_accumulator_value": not_negative(
                    initial_accumulator_value=initial_accumulator_value
                ),
                "l1": not_negative(l1=l1),
                "l2": not_negative(l2=l2),
                "l2_shrinkage": not_negative(l2_shrinkage=l2_shrinkage),
                "beta": not_negative(beta=beta),
            },
            **kwargs,
        )


class Function(Optimizer):
    """A rule of the user's own, which servers call for one piece of a variable after the other.

    Args:
        update: Called as ``update(param, grad, slots, learning_rate, step)``: the first two flat
            arrays of one length, of which it changes ``param`` in place; ``slots`` by name, as
            long, zeros at first; ``step`` from 1. It must be elementwise, for it does not know
            where a piece lies. Of variables on a GPU all are CuPy arrays there, and it must work on
            the current stream. It is pickled by cloudpickle.
        slots: Names of the arrays kept beside each variable.
        learning_rate: See :class:`Optimizer`.
        kwargs: See :class:`Optimizer`.
    """

    def __init__(
        self,
        update: Callable[..., Any],
        slots: Sequence[str] = (),
        learning_rate: float | Schedule = 0.01,
        **kwargs: Any,
    ) -> None:
        if not callable(update):
            raise TypeError(f"an update rule must be a function, not {update!r}")
        if isinstance(slots, str) or any(":" in slot or not slot for slot in slots):
            raise ValueError(f"slots are a list of names without ':', not {slots!r}")
        super().__init__(learning_rate, {}, **kwargs)
        self._update, self._slots = update, tuple(slots)

    def _describe(self) -> pb.OptimizerDef:
        described = super()._describe()
        described.function = cloudpickle.dumps(self._update)
        described.slots.extend(self._slots)
        return described
