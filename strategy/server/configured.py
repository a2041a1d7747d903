"""An optimizer of the workers, as a ps task applies it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence

import cloudpickle

from mpidist import errors
from mpidist.buffers.compiling import can_compile
from strategy.optimizers import BY_NAME, Function, Optimizer
from strategy.proto import parameter_server_pb2 as pb
from strategy.rules.numpy_rules import on_arrays
from strategy.rules.rule import Kind, Rule, Update


class Configured:
    """The rule of an optimizer, and the numbers of each of its steps.

    Args:
        definition: A worker's description of the optimizer.
        server: Name of the ps task, for messages.

    Attributes:
        name: The name under which slots are kept.
        kind: The name of the optimizer's class.
        rule: The update rule.

    Raises:
        InvalidArgumentError: A number is unknown or out of its range.
        UnimplementedError: There is no such optimizer.
    """

    def __init__(self, definition: pb.OptimizerDef, server: str) -> None:
        self.name, self.kind = definition.name, definition.kind
        self._optimizer: Optimizer
        self._schedule: Callable[[int], float] | None = None
        if definition.schedule:
            self._schedule = cloudpickle.loads(definition.schedule)
        if definition.function:
            function = Function(cloudpickle.loads(definition.function), definition.slots)
            self._optimizer, self.rule = function, _function_rule(self.name, function)
            return
        if definition.kind not in BY_NAME:
            raise errors.UnimplementedError(
                f"{server} has no optimizer {definition.kind!r}; it knows {', '.join(BY_NAME)}"
            )
        try:
            make: Callable[..., Optimizer] = BY_NAME[definition.kind]
            self._optimizer = make(**definition.values)
        except (TypeError, ValueError) as error:
            raise errors.InvalidArgumentError(f"{definition.kind}: {error}") from error
        self.rule = _optimizer_rule(self._optimizer)

    def numbers_at(self, step: int, rate: float) -> Sequence[float]:
        """Return the numbers of an update.

        Args:
            step: Number of the update of the variable, from 1.
            rate: The worker's learning rate, if there is no schedule.

        Raises:
            InvalidArgumentError: The schedule fails, or returns no learning rate.
        """
        return self._optimizer.numbers(self._rate_of_schedule(step, rate), step)

    def _rate_of_schedule(self, step: int, rate: float) -> float:
        if self._schedule is None:
            return rate
        try:
            rate = float(self._schedule(step - 1))
        except Exception as error:
            raise errors.InvalidArgumentError(
                f"the schedule of optimizer {self.name!r}, called with the number of earlier "
                f"updates, raised {_text(error)}"
            ) from error
        if not 0 <= rate < math.inf:
            raise errors.InvalidArgumentError(
                f"the schedule of optimizer {self.name!r} gives the learning rate {rate} after "
                f"{step - 1} updates"
            )
        return rate


def _optimizer_rule(optimizer: Optimizer) -> Rule:
    """Return the rule of an optimizer, compiled if numba is installed."""
    slots, formula = optimizer.slots(), optimizer.formula()
    compiled = None
    if can_compile():
        # The import of numba takes 0.5 s. A server without optimizers does not need it.
        from strategy.rules.numba_rules import element_by_element

        compiled = element_by_element(formula, len(slots))
    return Rule(on_arrays(formula), Kind.OPTIMIZER, slots, optimizer.initial(), compiled)


def _function_rule(name: str, optimizer: Function) -> Rule:
    """Return the rule that calls a user's function."""
    slots, half_changed = optimizer.slots(), "the variable may be half changed"

    def apply(update: Update) -> None:
        kept = dict(zip(slots, update.slots, strict=True))
        rate, step = update.numbers
        try:
            result = optimizer.update(update.param, update.grad, kept, rate, int(step))
        except Exception as error:
            raise errors.InvalidArgumentError(
                f"the function of optimizer {name!r}, called with (param, grad, slots, "
                f"learning_rate, step), raised {_text(error)}; {half_changed}"
            ) from error
        if result is not None or any(
            kept.get(key) is not slot for key, slot in zip(slots, update.slots, strict=True)
        ):
            raise errors.InvalidArgumentError(
                f"the function of optimizer {name!r} must change param and slots in place "
                f"(param -= ..., slots['m'][:] = ...) and return nothing; {half_changed}"
            )

    return Rule(apply, Kind.FUNCTION, slots)


def _text(error: Exception) -> str:
    """Return an error in words, also one without a message."""
    return "".join(traceback.format_exception_only(error)).strip()
