"""Optimizers: what a worker says of them. The arithmetic runs on the servers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpidist import Work
from strategy.change import push_all
from strategy.proto import parameter_server_pb2 as pb

if TYPE_CHECKING:
    from strategy.client import Connection
    from strategy.variable import Variable

__all__ = ["SGD", "Adam", "Applied", "Optimizer"]


@dataclass(frozen=True)
class Applied:
    """What became of gradients that were pushed.

    Attributes:
        versions: Version of each variable after its gradient was applied.
        staleness: For each, how many changes by others came between pull and push.
    """

    versions: tuple[int, ...]
    staleness: tuple[int, ...]


class Optimizer:
    """Base of the optimizers.

    Args:
        values: The rule's numbers.
    """

    def __init__(self, **values: float) -> None:
        self._values = {name: float(value) for name, value in values.items()}
        self._rules: dict[Connection, int] = {}

    @property
    def values(self) -> dict[str, float]:
        """The rule's numbers, by name."""
        return dict(self._values)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> Work:
        """Local. Push gradients to the servers, which apply them; advances the global step by one.

        Gradients are any arrays in host memory, of their variables' shapes; None is left out. They
        may be used again when the call returns.

        Args:
            grads_and_vars: Pairs of gradient and variable, all variables of one strategy.

        Returns:
            A Work whose result is :class:`Applied`, without the variables left out.

        Raises:
            ValueError: There is no gradient, a shape differs, or a variable comes twice.
            TypeError: A gradient is not an array in host memory, or its dtype does not fit.
        """
        pairs = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        if not pairs:
            raise ValueError("there is no gradient to apply: all are None, or the list is empty")
        strategy = pairs[0][1].strategy
        if any(var.strategy is not strategy for _, var in pairs):
            raise ValueError("all variables of one apply_gradients must belong to one strategy")
        if len({var.name for _, var in pairs}) < len(pairs):
            raise ValueError("a variable comes twice; add its gradients first")
        changes = [var.change(self._rule(var.remote.connection), grad) for grad, var in pairs]
        changes.append(strategy.global_step.change(pb.ADD, 1))
        return push_all(changes).then(_applied)

    def _rule(self, connection: Connection) -> int:
        if connection not in self._rules:
            kind = type(self).__name__
            self._rules[connection] = connection.configure(kind, self._values)
        return self._rules[connection]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:g}" for name, value in self._values.items())
        return f"{type(self).__name__}({values})"


class SGD(Optimizer):
    """Stochastic gradient descent: ``variable -= learning_rate * gradient``.

    Args:
        learning_rate: Positive.
    """

    def __init__(self, learning_rate: float = 0.01) -> None:
        super().__init__(learning_rate=_positive("learning_rate", learning_rate))


class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980).

    Args:
        learning_rate: Positive.
        beta_1: Decay of the mean, in [0, 1).
        beta_2: Decay of the squares, in [0, 1).
        epsilon: Positive; added to the root of the corrected squares.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
    ) -> None:
        super().__init__(
            learning_rate=_positive("learning_rate", learning_rate),
            beta_1=_decay("beta_1", beta_1),
            beta_2=_decay("beta_2", beta_2),
            epsilon=_positive("epsilon", epsilon),
        )


def _applied(pairs: list[tuple[int, int]]) -> Applied:
    gradients = pairs[:-1]  # the last one is the global step
    return Applied(tuple(v for v, _ in gradients), tuple(s for _, s in gradients))


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be positive, not {value!r}")
    return value


def _decay(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), not {value!r}")
    return value
