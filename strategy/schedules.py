"""Learning rate schedules, which the servers evaluate. Pure.

A schedule is any function from the number of earlier updates of the variable by optimizers of the
same name to a learning rate. The schedules here have the names and the formulas of
``tf.keras.optimizers.schedules``.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Schedule = Callable[[int], float]

_SAMPLES = (0, *(10**power for power in range(6)))  # from the first update to 100,000


@dataclass(frozen=True)
class ExponentialDecay:
    """Exponential decay: ``initial_learning_rate * decay_rate ** (step / decay_steps)``.

    Args:
        initial_learning_rate: Learning rate at step 0.
        decay_steps: Steps after which the rate is multiplied by ``decay_rate``; positive.
        decay_rate: The factor.
        staircase: Round ``step / decay_steps`` down, so that the rate falls in steps.

    Example:
        >>> from strategy import optimizers, schedules
        >>> schedule = schedules.ExponentialDecay(0.1, decay_steps=100, decay_rate=0.5)
        >>> [float(schedule(updates)) for updates in (0, 100, 200)]
        [0.1, 0.05, 0.025]
        >>> optimizer = optimizers.Adam(schedule)
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _check_steps(self.decay_steps)

    def __call__(self, step: int) -> float:
        """Return the learning rate after ``step`` updates."""
        power = step // self.decay_steps if self.staircase else step / self.decay_steps
        return float(self.initial_learning_rate * self.decay_rate**power)


@dataclass(frozen=True)
class InverseTimeDecay:
    """Inverse time decay: ``initial_learning_rate / (1 + decay_rate * step / decay_steps)``.

    Args:
        initial_learning_rate: Learning rate at step 0.
        decay_steps: Steps in which the divisor grows by ``decay_rate``; positive.
        decay_rate: Growth of the divisor, which is 1 at step 0.
        staircase: Round ``step / decay_steps`` down, so that the rate falls in steps.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        _check_steps(self.decay_steps)

    def __call__(self, step: int) -> float:
        """Return the learning rate after ``step`` updates."""
        time = step // self.decay_steps if self.staircase else step / self.decay_steps
        return self.initial_learning_rate / (1.0 + self.decay_rate * time)


@dataclass(frozen=True)
class PolynomialDecay:
    """Polynomial decay from one learning rate to another.

    Args:
        initial_learning_rate: Learning rate at step 0.
        decay_steps: Steps of the decay; positive.
        end_learning_rate: Learning rate after the decay.
        power: Power of the polynomial; 1 is a straight line.
        cycle: Extend the decay to the next multiple of ``decay_steps`` whenever it ends.
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __post_init__(self) -> None:
        _check_steps(self.decay_steps)

    def __call__(self, step: int) -> float:
        """Return the learning rate after ``step`` updates."""
        length = self.decay_steps
        if self.cycle:
            length *= max(math.ceil(step / length), 1)
        rest = 1.0 - min(step, length) / length
        fall = self.initial_learning_rate - self.end_learning_rate
        return float(fall * rest**self.power + self.end_learning_rate)


@dataclass(frozen=True)
class CosineDecay:
    """Cosine decay (Loshchilov and Hutter, arXiv 1608.03983) after an optional linear warm-up.

    Args:
        initial_learning_rate: Learning rate at step 0.
        decay_steps: Steps of the decay; positive.
        alpha: Learning rate after the decay, as a fraction of the rate at its start.
        warmup_target: Learning rate at the end of the warm-up; None for no warm-up.
        warmup_steps: Steps of the warm-up, before the decay.
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_steps(self.decay_steps)

    def __call__(self, step: int) -> float:
        """Return the learning rate after ``step`` updates."""
        top = self.initial_learning_rate
        if self.warmup_target is not None:
            if step < self.warmup_steps:
                return top + (self.warmup_target - top) * step / self.warmup_steps
            top, step = self.warmup_target, step - self.warmup_steps
        wave = 0.5 * (1.0 + math.cos(math.pi * min(step, self.decay_steps) / self.decay_steps))
        return top * ((1.0 - self.alpha) * wave + self.alpha)


@dataclass(frozen=True)
class PiecewiseConstantDecay:
    """Piecewise constant learning rate. A value holds up to and including its boundary.

    Args:
        boundaries: Last step of each value but the last, ascending.
        values: Learning rates, one more than ``boundaries``.
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"{len(self.boundaries)} boundaries need one value more, not {len(self.values)}"
            )
        if list(self.boundaries) != sorted(self.boundaries):
            raise ValueError(f"boundaries must ascend: {list(self.boundaries)}")

    def __call__(self, step: int) -> float:
        """Return the learning rate after ``step`` updates."""
        return float(self.values[bisect.bisect_left(self.boundaries, step)])


def name_of(schedule: Schedule) -> str:
    """Return the repr of a schedule of this module, or the qualified name of another function."""
    if type(schedule).__module__ == __name__:
        return repr(schedule)
    name: str = getattr(schedule, "__qualname__", type(schedule).__qualname__)
    return name


def described(schedule: Schedule) -> str:
    """Describe a schedule by its name and its rates after 0, 1, 10, ... 100,000 updates.

    Workers compare the rates and not the code, because equal schedules may be different objects.
    Nine digits hide differences between the math libraries of hosts.
    """
    rates = ", ".join([_rate_text(schedule, step) for step in _SAMPLES])
    return f"{name_of(schedule)} with rates {rates} after 0, 1, 10, ... {_SAMPLES[-1]} updates"


def _rate_text(schedule: Schedule, step: int) -> str:
    """Return the learning rate after ``step`` updates. Return the class of an error in its place.

    The ps task reports the error if it calls the schedule for this step.
    """
    try:
        return f"{float(schedule(step)):.9g}"
    except (Exception, SystemExit) as error:  # the ps task also reports a schedule that exits
        return type(error).__name__


def _check_steps(steps: int) -> None:
    if not steps > 0:
        raise ValueError(f"decay_steps must be positive, not {steps!r}")
