"""Optimizers: hyperparameters, and the update formulas that the ps tasks apply.

To add an optimizer, write its formula and its class here, add the class to ``BY_NAME`` and
``__all__``, and add a case to ``tests/unit/test_strategy_rules.py``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from mpidist import Work, errors
from strategy.rules import Formula, Shape
from strategy.schedules import Schedule, name_of

__all__ = [
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Applied",
    "Ftrl",
    "Function",
    "Lamb",
    "Lion",
    "Nadam",
    "Optimizer",
    "RMSprop",
]

Slots = tuple[str, ...]
Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Applied:
    """The result of :meth:`Optimizer.apply_gradients`.

    Attributes:
        versions: Version of each variable after its gradient was applied. A partitioned variable
            has a tuple with one version for each part.
        staleness: For each variable, the number of changes by other workers between the pull and
            the push. A partitioned variable has the largest number of its parts.
        contributed: Whether the gradients were applied. They are not if they arrive too late for
            their step, in mode ``"sync"`` with backup workers, or if they have NaN or infinite
            elements and the strategy's ``nan`` is ``"skip"``. Then ``versions`` and ``staleness``
            are empty.
    """

    versions: tuple[int | tuple[int, ...], ...]
    staleness: tuple[int, ...]
    contributed: bool = True


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, str | bool) or not hasattr(value, "__float__") or np.ndim(value):
        raise TypeError(f"{name} must be a number, not {value!r}")


def _check_flag(name: str, value: Any) -> None:
    if np.ndim(value) or value not in (0, 1):  # servers get all values as float64
        raise TypeError(f"{name} must be True or False, not {value!r}")


@dataclass(frozen=True)
class _Range:
    """A condition on numbers of an optimizer. Called with a default, it makes a checked field.

    Attributes:
        must: The condition, for messages.
        holds: Returns whether a number meets the condition.
    """

    must: str
    holds: Callable[[float], bool]

    def __call__(self, default: float) -> float:
        made: float = field(default=default, metadata={"check": self.check})
        return made

    def check(self, name: str, value: Any) -> None:
        _check_number(name, value)
        if not self.holds(value):
            raise ValueError(f"{name} must {self.must}, not {value!r}")


_positive = _Range("be positive", lambda value: value > 0)
_not_negative = _Range("not be negative", lambda value: value >= 0)
_not_positive = _Range("not be positive", lambda value: value <= 0)
_fraction = _Range("be in [0, 1)", lambda value: 0 <= value < 1)


def _flag(default: bool) -> bool:
    """Return a checked field for a choice."""
    made: bool = field(default=default, metadata={"check": _check_flag})
    return made


@dataclass(eq=False, repr=False)
class Optimizer:
    """Base class of the optimizers.

    Only the learning rate of an optimizer can be set later, and only a number in place of a number:
    a schedule cannot be set or replaced. Pushes from then on use the new rate. In mode ``"sync"``
    all workers must set the same learning rate at the same step.

    Variables of float16 and bfloat16 are updated in float32. The ps task keeps both copies.

    Args:
        learning_rate: A number, at least 0, or a schedule: a function from the number of earlier
            updates of the variable by optimizers of this name to a learning rate; see
            :mod:`strategy.schedules`. The schedule is pickled by cloudpickle, and called on the ps
            tasks. In mode ``"sync"`` workers call it, too: they compare its rates after 0, 1, 10,
            ... 100,000 updates.
        clipnorm: Limit for the norm of each gradient. Larger gradients are scaled down. In mode
            ``"sync"`` each worker clips its own gradients, before their mean is taken.
        global_clipnorm: As ``clipnorm``, for the norm of all gradients of an ``apply_gradients``
            together.
        clipvalue: Limit for the absolute value of each element. Larger elements are set to the
            limit, with their sign.
        name: Name under which the ps tasks and checkpoints keep the slots; by default the name of
            the class. Optimizers with the same name share slots.

    Raises:
        TypeError: An argument is not a number.
        ValueError: A number is out of its range, or several clip limits are given.

    Example:
        >>> import numpy as np
        >>> from strategy import get_variable, optimizers
        >>> weights = get_variable("weights", shape=(2,), initializer="zeros")
        >>> optimizer = optimizers.SGD(0.5, momentum=0.9)
        >>> push = optimizer.apply_gradients([(np.ones(2, "float32"), weights)])
        >>> push.result().versions  # waits until the ps task has applied the push
        (2,)
        >>> optimizer.learning_rate = 0.1  # of later pushes
    """

    learning_rate: float | Schedule
    clipnorm: float | None = field(default=None, kw_only=True)
    global_clipnorm: float | None = field(default=None, kw_only=True)
    clipvalue: float | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)

    needs_all: ClassVar[bool] = False
    """True if the formula needs all elements of a variable, for example a norm."""

    _slots: ClassVar[Slots] = ()
    _formula: ClassVar[Formula]
    _common: ClassVar = ("learning_rate", "clipnorm", "global_clipnorm", "clipvalue", "name")

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or set(self.name) & {":", "/"}:
            raise ValueError(f"an optimizer needs a name without ':' and '/', not {self.name!r}")
        given = [name for name in self._common[1:4] if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give clipnorm, global_clipnorm or clipvalue, not {given}")
        for name in given:
            _positive.check(name, getattr(self, name))
        for one in fields(self):
            check = one.metadata.get("check")
            if check is not None:
                check(one.name, getattr(self, one.name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "learning_rate":
            before = self.__dict__.get(name)
            if before is not None and (callable(value) or callable(before)):
                raise TypeError(
                    "a schedule can be neither set nor replaced, only a number by a number: make "
                    "another optimizer of the same name, which goes on with the slots"
                )
            if not callable(value):
                _check_number(name, value)
                # A comparison of NumPy's float32 with the largest float64 would overflow.
                number = value if isinstance(value, int) else float(value)
                if not 0 <= number <= sys.float_info.max:
                    raise ValueError(f"{name} must be at least 0 and finite, not {value!r}")
                value = float(number)
        elif name in self.__dict__ or name not in self._settable:
            raise AttributeError(
                f"only the learning rate of an optimizer can be set, not {name!r}: make another "
                "optimizer"
            )
        elif name == "name" and value is None:
            value = type(self).__name__
        object.__setattr__(self, name, value)

    @property
    def _settable(self) -> set[str]:
        """The names of the attributes that the constructor sets, each once."""
        return {one.name for one in fields(self)}

    @property
    def hyperparameters(self) -> dict[str, float]:
        """The optimizer's own numbers by name, without the learning rate."""
        own = [one.name for one in fields(self) if one.name not in self._common]
        return {name: float(getattr(self, name)) for name in own}

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Work:
        """Push gradients to the ps tasks, which apply them. Advances the global step by one.

        You may reuse the arrays when the call returns, although the gradients may be applied later.
        Later reads of this worker wait until the gradients are applied. Other workers see the
        result then. Replicas of a worker meet in this call: the means of their gradients are pushed
        once, and all replicas get the same Work.

        In modes ``"sync"`` and ``"ssp"`` the call waits for other workers. In mode ``"sync"`` the
        call waits until enough workers take part in the step. In mode ``"ssp"`` the call waits
        until the gradients are applied and this worker may begin the next step.

        Args:
            grads_and_vars: Pairs of gradient and variable, all variables of one strategy. A
                gradient is any array with the shape of the variable, also on a GPU, an
                :class:`IndexedSlices` for some rows, or a result of
                :func:`strategy.to_host_ahead`. Pairs with the gradient None are left out.

        Returns:
            A Work whose result is :class:`Applied`, without the variables left out. The Work fails
            with InvalidArgumentError if a schedule or a user's function fails on a ps task, if a
            variable has integers or bools, or if :class:`Lamb` or :class:`Adafactor` gets a
            gradient of rows. The Work fails with AbortedError if another member of a synchronous
            step fails.

        Raises:
            InvalidArgumentError: A gradient has elements that are NaN or infinite, and the
                strategy's ``nan`` is ``"error"``. Nothing has been pushed. Or, in mode ``"sync"``,
                the steps of workers differ in variables or optimizers.
            FailedPreconditionError: The strategy was closed. Or, in mode ``"sync"`` or ``"ssp"``,
                this worker has called ``finish()``.
            ValueError: There is no gradient, a shape differs, a variable comes twice, or the norm
                of gradients to be clipped is NaN or infinite.
            TypeError: A gradient is not an array, or its dtype does not fit.
        """
        pairs = [(grad, var) for grad, var in _pairs(grads_and_vars) if grad is not None]
        if not pairs:
            raise ValueError("there is no gradient to apply: all are None, or the list is empty")
        work: Work = pairs[0][1].strategy.push_gradients(self, pairs)
        return work

    def slots(self) -> Slots:
        """Return the names of the arrays that the optimizer keeps beside each variable."""
        return self._slots

    def slot_shapes(self, shape: Shape) -> Sequence[Shape]:
        """Return the shape of each slot for the shape of a variable.

        Only an optimizer with :attr:`needs_all` may return other shapes than the variable's.
        """
        return [shape] * len(self.slots())

    def initial(self) -> dict[str, float]:
        """Return the initial values of slots that do not begin with 0."""
        return {}

    def formula(self) -> Formula:
        """Return the update rule. Formulas are functions of this module."""
        return self._formula

    def numbers(self, rate: float, step: int) -> Numbers:
        """Return the last arguments of the formula.

        Args:
            rate: The learning rate.
            step: Number of the update of the variable, from 1.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        rate = self.learning_rate
        shown = {"learning_rate": name_of(rate) if callable(rate) else f"{rate:g}"}
        shown |= {name: f"{value:g}" for name, value in self.hyperparameters.items()}
        clipped = {name: getattr(self, name) for name in self._common[1:4]}
        shown |= {name: f"{limit:g}" for name, limit in clipped.items() if limit is not None}
        return f"{type(self).__name__}({', '.join(f'{key}={text}' for key, text in shown.items())})"


def _pairs(grads_and_vars: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the pairs of gradient and variable. Raise TypeError for other elements."""
    pairs = list(grads_and_vars)
    for number, pair in enumerate(pairs):
        parts = tuple(pair) if isinstance(pair, tuple | list) else (pair,)
        if len(parts) != 2 or (parts[0] is not None and not hasattr(parts[1], "changes")):
            got = " and ".join(map(errors.type_name, parts))
            raise TypeError(
                "apply_gradients needs a list of pairs of a gradient and its variable, in this "
                f"order; number {number} of what it got is {got}"
            )
    return pairs


# Formulas take arrays or single elements. Formulas of optimizers with needs_all take whole arrays.
# "rest" is 1 minus a decay rate.


def _sgd(p: Any, g: Any, rate: Any, decay: Any) -> tuple[Any, ...]:
    """Return the update of gradient descent."""
    if decay != 0:
        g = p * decay + g
    return (p - g * rate,)


def _momentum_sgd(
    p: Any, g: Any, velocity: Any, rate: Any, decay: Any, momentum: Any, nesterov: Any
) -> tuple[Any, ...]:
    """Return the update of gradient descent with momentum, as in torch."""
    if decay != 0:
        g = p * decay + g
    velocity = velocity * momentum + g
    if nesterov != 0:  # Sutskever et al., ICML 2013, as rewritten by Keras
        return p - (velocity * momentum + g) * rate, velocity
    return p - velocity * rate, velocity


def _adagrad(p: Any, g: Any, squares: Any, rate: Any, decay: Any, epsilon: Any) -> tuple[Any, ...]:
    """Return the update of Adagrad."""
    if decay != 0:
        g = p * decay + g
    squares = squares + g * g
    return p - g / (np.sqrt(squares) + epsilon) * rate, squares


def _adadelta(
    p: Any, g: Any, squares: Any, deltas: Any, rate: Any, decay: Any, epsilon: Any, rho: Any,
    rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of Adadelta."""
    if decay != 0:
        g = p * decay + g
    squares = squares * rho + g * g * rest
    delta = np.sqrt(deltas + epsilon) / np.sqrt(squares + epsilon) * g
    return p - delta * rate, squares, deltas * rho + delta * delta * rest


def _rmsprop(
    p: Any, g: Any, squares: Any, rate: Any, decay: Any, epsilon: Any, rho: Any, rest: Any
) -> tuple[Any, ...]:
    """Return the update of RMSprop."""
    if decay != 0:
        g = p * decay + g
    squares = squares * rho + g * g * rest
    return p - g / (np.sqrt(squares) + epsilon) * rate, squares


def _momentum_rmsprop(
    p: Any, g: Any, squares: Any, velocity: Any, rate: Any, decay: Any, epsilon: Any, rho: Any,
    rest: Any, momentum: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of RMSprop with momentum."""
    if decay != 0:
        g = p * decay + g
    squares = squares * rho + g * g * rest
    velocity = velocity * momentum + g / (np.sqrt(squares) + epsilon)
    return p - velocity * rate, squares, velocity


def _centered_rmsprop(
    p: Any, g: Any, squares: Any, mean: Any, velocity: Any, rate: Any, decay: Any, epsilon: Any,
    rho: Any, rest: Any, momentum: Any, zero: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of centered RMSprop (arXiv 1308.0850, equations 38 to 45)."""
    if decay != 0:
        g = p * decay + g
    squares = squares * rho + g * g * rest
    mean = mean * rho + g * rest
    spread = np.maximum(squares - mean * mean, zero)  # rounding may give less than 0
    velocity = velocity * momentum + g / (np.sqrt(spread) + epsilon)
    return p - velocity * rate, squares, mean, velocity


def _adam(
    p: Any, g: Any, m: Any, v: Any, rate: Any, decay: Any, shrink: Any, epsilon: Any, beta_1: Any,
    rest_1: Any, beta_2: Any, rest_2: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of Adam in the efficient form at the end of section 2 of the paper."""
    if shrink != 1:
        p = p * shrink
    if decay != 0:
        g = p * decay + g
    v = v * beta_2 + g * g * rest_2
    m = m * beta_1 + g * rest_1
    return p - m / (np.sqrt(v) + epsilon) * rate, m, v


def _amsgrad(
    p: Any, g: Any, m: Any, v: Any, largest: Any, rate: Any, decay: Any, shrink: Any, epsilon: Any,
    beta_1: Any, rest_1: Any, beta_2: Any, rest_2: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of AMSGrad, with the largest second moment so far, as in torch."""
    if shrink != 1:
        p = p * shrink
    if decay != 0:
        g = p * decay + g
    v = v * beta_2 + g * g * rest_2
    m = m * beta_1 + g * rest_1
    largest = np.maximum(largest, v)
    return p - m / (np.sqrt(largest) + epsilon) * rate, m, v, largest


def _adamax(
    p: Any, g: Any, m: Any, largest: Any, rate: Any, decay: Any, epsilon: Any, beta_1: Any,
    rest_1: Any, beta_2: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of Adamax, with epsilon in the same place as in torch."""
    if decay != 0:
        g = p * decay + g
    m = m * beta_1 + g * rest_1
    largest = np.maximum(largest * beta_2, np.abs(g) + epsilon)
    return p - m / largest * rate, m, largest


def _nadam(
    p: Any, g: Any, m: Any, v: Any, rate_g: Any, rate_m: Any, decay: Any, epsilon: Any,
    beta_1: Any, rest_1: Any, beta_2: Any, rest_2: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of Nadam."""
    if decay != 0:
        g = p * decay + g
    m = m * beta_1 + g * rest_1
    v = v * beta_2 + g * g * rest_2
    return p - (g * rate_g + m * rate_m) / (np.sqrt(v) + epsilon), m, v


def _lamb(
    p: Any, g: Any, m: Any, v: Any, rate: Any, decay: Any, one: Any, correct_1: Any, correct_2: Any,
    epsilon: Any, beta_1: Any, rest_1: Any, beta_2: Any, rest_2: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of LAMB, with the trust ratio 1 if a norm is 0."""
    m = m * beta_1 + g * rest_1
    v = v * beta_2 + g * g * rest_2
    step = m * correct_1 / (np.sqrt(v * correct_2) + epsilon) + p * decay
    length, step_length = np.sqrt((p * p).sum()), np.sqrt((step * step).sum())
    usable = (length > 0) & (step_length > 0)
    ratio = (length * usable + (one - usable)) / (step_length * usable + (one - usable))
    return p - step * (ratio * rate), m, v


def _adafactor(
    p: Any, g: Any, rows: Any, columns: Any, rate: Any, weight: Any, epsilon_1: Any,
    epsilon_2: Any, threshold: Any, shrink: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of Adafactor, as in torch."""
    if epsilon_1 == 0:
        epsilon_1 = np.finfo(p.dtype).eps.astype(p.dtype)
    squares = g * g
    if p.ndim > 1:
        rows = rows + (squares.mean(axis=-1, keepdims=True) - rows) * weight
        columns = columns + (squares.mean(axis=-2, keepdims=True) - columns) * weight
        variance = rows * columns / np.maximum(rows.mean(axis=-2, keepdims=True), epsilon_1)
    else:
        variance = rows = rows + (squares - rows) * weight
    step = g / np.sqrt(np.maximum(variance, epsilon_1 * epsilon_1))
    size = np.maximum(np.sqrt((p * p).mean()), epsilon_2)
    excess = np.maximum(np.sqrt((step * step).mean()), threshold) / threshold
    return p * shrink - step * (size * rate / excess), rows, columns


def _lion(
    p: Any, g: Any, m: Any, rate: Any, shrink: Any, beta_1: Any, rest_1: Any, beta_2: Any,
    rest_2: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of Lion."""
    step = np.sign(m * beta_1 + g * rest_1)
    return p * shrink - step * rate, m * beta_2 + g * rest_2


def _ftrl(
    p: Any, g: Any, squares: Any, linear: Any, rate: Any, beta: Any, l1: Any, l2: Any,
    shrinkage: Any, least: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the update of FTRL-Proximal with the learning rate power -1/2.

    A learning rate of 0 changes neither the variable nor the slots. After a change of the rate, the
    next update computes the whole variable anew from the slots and the new rate.
    """
    if rate == 0:
        return p, squares, linear
    before = np.sqrt(squares)
    squares = squares + g * g
    root = np.sqrt(squares)
    linear = linear + (g - ((root - before) / rate - shrinkage) * p)
    clipped = np.minimum(np.maximum(linear, -l1), l1)
    scale = np.maximum((root + beta) / rate + l2, least)  # 0 if all gradients were 0
    return (clipped - linear) / scale, squares, linear


@dataclass(eq=False, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent: ``variable -= learning_rate * gradient``.

    With momentum, the gradient is replaced by ``velocity = momentum * velocity + gradient``. With
    Nesterov's momentum, the gradient is replaced by ``momentum * velocity + gradient``.

    Args:
        momentum: In [0, 1).
        nesterov: Use Nesterov's momentum.
        weight_decay: Adds ``weight_decay * variable`` to the gradient.

    The other arguments are those of :class:`Optimizer`.
    """

    learning_rate: float | Schedule = 0.01
    momentum: float = _fraction(0.0)
    nesterov: bool = _flag(False)
    weight_decay: float = _not_negative(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum")

    def slots(self) -> Slots:
        return ("momentum",) if self.momentum else ()

    def formula(self) -> Formula:
        return _momentum_sgd if self.momentum else _sgd

    def numbers(self, rate: float, step: int) -> Numbers:
        own = (self.momentum, self.nesterov) if self.momentum else ()
        return (rate, self.weight_decay, *own)


@dataclass(eq=False, repr=False)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011).

    Args:
        initial_accumulator_value: Initial value of the sums of squares; not negative.
        epsilon: Positive; added to the root of the sums.
        weight_decay: Adds ``weight_decay * variable`` to the gradient.

    The other arguments are those of :class:`Optimizer`.
    """

    learning_rate: float | Schedule = 0.001
    initial_accumulator_value: float = _not_negative(0.1)
    epsilon: float = _positive(1e-7)
    weight_decay: float = _not_negative(0.0)
    _slots: ClassVar[Slots] = ("accumulator",)
    _formula: ClassVar[Formula] = staticmethod(_adagrad)

    def initial(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def numbers(self, rate: float, step: int) -> Numbers:
        return rate, self.weight_decay, self.epsilon


@dataclass(eq=False, repr=False)
class Adadelta(Optimizer):
    """Adadelta (Zeiler, arXiv 1212.5701).

    Args:
        learning_rate: See :class:`Optimizer`; the paper uses 1.0.
        rho: Decay rate of both means of squares, in [0, 1).
        epsilon: Positive; added to the means before their roots are taken.
        weight_decay: Adds ``weight_decay * variable`` to the gradient.

    The other arguments are those of :class:`Optimizer`.
    """

    learning_rate: float | Schedule = 0.001
    rho: float = _fraction(0.95)
    epsilon: float = _positive(1e-7)
    weight_decay: float = _not_negative(0.0)
    _slots: ClassVar[Slots] = ("squares", "deltas")
    _formula: ClassVar[Formula] = staticmethod(_adadelta)

    def numbers(self, rate: float, step: int) -> Numbers:
        return rate, self.weight_decay, self.epsilon, self.rho, 1.0 - self.rho


@dataclass(eq=False, repr=False)
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton, 2012).

    Args:
        rho: Decay rate of the squares, in [0, 1).
        momentum: Momentum of the steps, in [0, 1).
        epsilon: Positive; added to the root of the squares.
        centered: Subtract the square of the mean gradient from the mean of squares (Graves, arXiv
            1308.0850).
        weight_decay: Adds ``weight_decay * variable`` to the gradient.

    The other arguments are those of :class:`Optimizer`.
    """

    learning_rate: float | Schedule = 0.001
    rho: float = _fraction(0.9)
    momentum: float = _fraction(0.0)
    epsilon: float = _positive(1e-7)
    centered: bool = _flag(False)
    weight_decay: float = _not_negative(0.0)

    def slots(self) -> Slots:
        if self.centered:
            return ("squares", "mean", "momentum")
        return ("squares", "momentum") if self.momentum else ("squares",)

    def formula(self) -> Formula:
        if self.centered:
            return _centered_rmsprop
        return _momentum_rmsprop if self.momentum else _rmsprop

    def numbers(self, rate: float, step: int) -> Numbers:
        common = rate, self.weight_decay, self.epsilon, self.rho, 1.0 - self.rho
        if self.centered:
            return (*common, self.momentum, 0.0)
        return (*common, self.momentum) if self.momentum else common


@dataclass(eq=False, repr=False)
class _Moments(Optimizer):
    """Base class of Adam and its variants."""

    learning_rate: float | Schedule = 0.001
    beta_1: float = _fraction(0.9)
    beta_2: float = _fraction(0.999)
    epsilon: float = _positive(1e-7)
    weight_decay: float = _not_negative(0.0)
    _slots: ClassVar[Slots] = ("m", "v")

    def _betas(self) -> Numbers:
        return (self.beta_1, 1.0 - self.beta_1, self.beta_2, 1.0 - self.beta_2)


@dataclass(eq=False, repr=False)
class Adam(_Moments):
    """Adam (Kingma and Ba, arXiv 1412.6980).

    Args:
        beta_1: Decay rate of the first moment, in [0, 1).
        beta_2: Decay rate of the second moment, in [0, 1).
        epsilon: Positive; added to the root of the corrected second moment.
        weight_decay: Adds ``weight_decay * variable`` to the gradient.
        amsgrad: Divide by the root of the maximum of the second moment so far, in place of the
            second moment (Reddi et al., ICLR 2018).

    The other arguments are those of :class:`Optimizer`.
    """

    amsgrad: bool = _flag(False)

    def slots(self) -> Slots:
        return ("m", "v", "largest_v") if self.amsgrad else ("m", "v")

    def formula(self) -> Formula:
        return _amsgrad if self.amsgrad else _adam

    def numbers(self, rate: float, step: int) -> Numbers:
        return self._numbers(rate, step, self.weight_decay, 1.0)

    def _numbers(self, rate: float, step: int, decay: float, shrink: float) -> Numbers:
        correction = math.sqrt(1.0 - self.beta_2**step)
        rate = rate * correction / (1.0 - self.beta_1**step)
        return (rate, decay, shrink, self.epsilon * correction, *self._betas())


@dataclass(eq=False, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).

    Args:
        beta_1: See :class:`Adam`.
        beta_2: See :class:`Adam`.
        epsilon: See :class:`Adam`.
        weight_decay: Each step subtracts ``learning_rate * weight_decay`` times the variable.
        amsgrad: See :class:`Adam`.

    The other arguments are those of :class:`Optimizer`.
    """

    weight_decay: float = _not_negative(0.004)

    def numbers(self, rate: float, step: int) -> Numbers:
        return self._numbers(rate, step, 0.0, 1.0 - rate * self.weight_decay)


@dataclass(eq=False, repr=False)
class Adamax(_Moments):
    """Adamax (Kingma and Ba, arXiv 1412.6980, section 7.1).

    Args:
        beta_1: Decay rate of the first moment, in [0, 1).
        beta_2: Decay rate of the largest absolute value, in [0, 1).
        epsilon: Positive; added to the absolute values of the gradient.
        weight_decay: Adds ``weight_decay * variable`` to the gradient.

    The other arguments are those of :class:`Optimizer`.
    """

    _slots: ClassVar[Slots] = ("m", "largest")
    _formula: ClassVar[Formula] = staticmethod(_adamax)

    def numbers(self, rate: float, step: int) -> Numbers:
        rate = rate / (1.0 - self.beta_1**step)
        return (rate, self.weight_decay, self.epsilon, *self._betas()[:3])


@dataclass(eq=False, repr=False)
class Nadam(_Moments):
    """Adam with Nesterov's momentum (Dozat, ICLR workshop 2016).

    Args:
        beta_1: Decay rate of the first moment, in [0, 1).
        beta_2: Decay rate of the second moment, in [0, 1).
        epsilon: Positive; added to the root of the corrected second moment.
        weight_decay: Adds ``weight_decay * variable`` to the gradient.
        momentum_decay: Speed with which the momentum approaches ``beta_1``; not negative.

    The other arguments are those of :class:`Optimizer`.
    """

    momentum_decay: float = _not_negative(0.004)
    _formula: ClassVar[Formula] = staticmethod(_nadam)

    def numbers(self, rate: float, step: int) -> Numbers:
        # The product of all momenta. Each of the first hundred is below 0.54 with the default
        # decay, so that further factors change nothing.
        product = 1.0
        for earlier in range(1, step + 1):
            product *= self._momentum(earlier)
            if product < 1e-20:
                break
        momentum, following = self._momentum(step), self._momentum(step + 1)
        correction = math.sqrt(1.0 - self.beta_2**step)
        rate_g = rate * correction * (1.0 - momentum) / (1.0 - product)
        rate_m = rate * correction * following / (1.0 - product * following)
        epsilon = self.epsilon * correction
        return (rate_g, rate_m, self.weight_decay, epsilon, *self._betas())

    def _momentum(self, step: int) -> float:
        return float(self.beta_1 * (1.0 - 0.5 * 0.96 ** (step * self.momentum_decay)))


@dataclass(eq=False, repr=False)
class Lamb(_Moments):
    """LAMB (You et al., arXiv 1904.00962): Adam with steps in proportion to each variable's norm.

    The norms are those of a variable, or of each part of a divided variable. Gradients must be of
    whole variables, not of rows. ps tasks update with NumPy or CuPy, without numba.

    Args:
        beta_1: Decay rate of the first moment, in [0, 1).
        beta_2: Decay rate of the second moment, in [0, 1).
        epsilon: Positive; added to the root of the corrected second moment.
        weight_decay: Adds ``weight_decay * variable`` to the step, before the norm is taken.

    The other arguments are those of :class:`Optimizer`.
    """

    epsilon: float = _positive(1e-6)
    needs_all: ClassVar[bool] = True
    _formula: ClassVar[Formula] = staticmethod(_lamb)

    def numbers(self, rate: float, step: int) -> Numbers:
        corrections = 1.0 / (1.0 - self.beta_1**step), 1.0 / (1.0 - self.beta_2**step)
        return (rate, self.weight_decay, 1.0, *corrections, self.epsilon, *self._betas())


@dataclass(eq=False, repr=False)
class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235), as in torch.

    Variables of two or more axes have slots for the mean squares of rows and of columns, in place
    of a slot for each element. They and the norms are those of a variable, or of each part of a
    divided variable. Gradients must be of whole variables, not of rows. ps tasks update with NumPy
    or CuPy, without numba. If a checkpoint is restored into another partitioning, these slots begin
    anew.

    Args:
        learning_rate: Upper limit of the relative step size, which is 1 over the root of the number
            of updates; at least 0, or a schedule.
        beta_2_decay: Power of the number of updates that gives the weight of the newest gradient
            in the mean squares; not positive.
        epsilon_1: Lower limit of the root of the mean squares. 0 takes the machine epsilon of the
            variable's dtype.
        epsilon_2: Positive; lower limit of the root mean square of a variable, to which its step is
            proportional.
        clip_threshold: Positive; upper limit of the root mean square of a step before it is scaled.
        weight_decay: Each step subtracts ``learning_rate * weight_decay`` times the variable.

    The other arguments are those of :class:`Optimizer`.
    """

    learning_rate: float | Schedule = 0.01
    beta_2_decay: float = _not_positive(-0.8)
    epsilon_1: float = _not_negative(0.0)
    epsilon_2: float = _positive(1e-3)
    clip_threshold: float = _positive(1.0)
    weight_decay: float = _not_negative(0.0)
    needs_all: ClassVar[bool] = True
    _slots: ClassVar[Slots] = ("row_squares", "column_squares")
    _formula: ClassVar[Formula] = staticmethod(_adafactor)

    def slot_shapes(self, shape: Shape) -> Sequence[Shape]:
        if len(shape) < 2:
            return shape, (0,)
        return (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])

    def numbers(self, rate: float, step: int) -> Numbers:
        shrink = 1.0 - rate * self.weight_decay
        epsilons = self.epsilon_1, self.epsilon_2
        return (
            min(rate, step**-0.5), step**self.beta_2_decay, *epsilons, self.clip_threshold, shrink
        )  # fmt: skip


@dataclass(eq=False, repr=False)
class Lion(Optimizer):
    """Lion (Chen et al., arXiv 2302.06675).

    Each element moves by the learning rate, against the sign of the interpolated momentum.

    Args:
        beta_1: Weight of the momentum in its interpolation with the gradient, in [0, 1).
        beta_2: Decay rate of the momentum, in [0, 1).
        weight_decay: Each step subtracts ``learning_rate * weight_decay`` times the variable.

    The other arguments are those of :class:`Optimizer`.
    """

    learning_rate: float | Schedule = 0.001
    beta_1: float = _fraction(0.9)
    beta_2: float = _fraction(0.99)
    weight_decay: float = _not_negative(0.0)
    _slots: ClassVar[Slots] = ("momentum",)
    _formula: ClassVar[Formula] = staticmethod(_lion)

    def numbers(self, rate: float, step: int) -> Numbers:
        shrink = 1.0 - rate * self.weight_decay
        return (rate, shrink, self.beta_1, 1.0 - self.beta_1, self.beta_2, 1.0 - self.beta_2)


@dataclass(eq=False, repr=False)
class Ftrl(Optimizer):
    """Follow the regularized leader (McMahan et al., KDD 2013), with learning rate power -1/2.

    Args:
        initial_accumulator_value: Initial value of the sums of squares; not negative.
        l1: L1 regularization, not negative.
        l2: L2 regularization, not negative.
        l2_shrinkage: L2 regularization of the gradient alone, not negative.
        beta: Added to the root of the sums, not negative.

    The other arguments are those of :class:`Optimizer`.
    """

    learning_rate: float | Schedule = 0.001
    initial_accumulator_value: float = _not_negative(0.1)
    l1: float = _not_negative(0.0)
    l2: float = _not_negative(0.0)
    l2_shrinkage: float = _not_negative(0.0)
    beta: float = _not_negative(0.0)
    _slots: ClassVar[Slots] = ("accumulator", "linear")
    _formula: ClassVar[Formula] = staticmethod(_ftrl)

    def initial(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def numbers(self, rate: float, step: int) -> Numbers:
        least = float(np.finfo(np.float32).tiny)
        return rate, self.beta, self.l1, 2.0 * self.l2, 2.0 * self.l2_shrinkage, least


class Function(Optimizer):
    """A user-defined update rule.

    A ps task calls the rule once for each tile of a variable: a contiguous range of elements, or
    some of the rows if the gradient is of rows.

    Args:
        update: Called as ``update(param, grad, slots, learning_rate, step)``. ``param`` and
            ``grad`` are flat arrays of one length. The function changes ``param`` in place.
            ``slots`` maps names to arrays of that length, initially zeros. ``step`` is the number
            of the update of the variable, from 1. The function must be elementwise, because it does
            not know the position of a tile. For variables on a GPU, all arrays are CuPy arrays on
            that GPU, and the function must work on the current stream. It is pickled by
            cloudpickle.
        slots: Names of the arrays kept beside each variable.
        learning_rate: See :class:`Optimizer`.
        clipnorm: See :class:`Optimizer`.
        global_clipnorm: See :class:`Optimizer`.
        clipvalue: See :class:`Optimizer`.
        name: See :class:`Optimizer`.

    Example:
        >>> import numpy as np
        >>> from strategy import get_variable, optimizers
        >>> def sign_descent(param, grad, slots, learning_rate, step):
        ...     param -= learning_rate * np.sign(grad)
        >>> signed = get_variable("signed", shape=(2,), initializer="zeros")
        >>> optimizer = optimizers.Function(sign_descent, learning_rate=0.5)
        >>> push = optimizer.apply_gradients([(np.array([3.0, -7.0], "float32"), signed)])
        >>> signed.numpy()
        array([-0.5,  0.5], dtype=float32)
    """

    def __init__(
        self,
        update: Callable[..., Any],
        slots: Sequence[str] = (),
        learning_rate: float | Schedule = 0.01,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(update):
            raise TypeError(f"an update rule must be a function, not {update!r}")
        names = [] if isinstance(slots, str) else list(slots)
        valid = all(isinstance(name, str) and name and ":" not in name for name in names)
        if isinstance(slots, str) or not valid or len(set(names)) < len(names):
            raise ValueError(f"slots are a list of different names without ':', not {slots!r}")
        super().__init__(
            learning_rate,
            clipnorm=clipnorm,
            global_clipnorm=global_clipnorm,
            clipvalue=clipvalue,
            name=name,
        )
        self.update = update
        self.slot_names = tuple(slots)

    @property
    def _settable(self) -> set[str]:
        return super()._settable | {"update", "slot_names"}

    def slots(self) -> Slots:
        return self.slot_names

    def numbers(self, rate: float, step: int) -> Numbers:
        return rate, step


BY_NAME: dict[str, type[Optimizer]] = {
    kind.__name__: kind
    for kind in (
        *(SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Ftrl, Lamb, Lion, Nadam, RMSprop),
    )
}
"""The optimizers with formulas, by the name of the class."""
