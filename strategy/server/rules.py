"""The update rules of a server: assign, add and the like, and the optimizers of workers."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import cloudpickle
import numpy as np

from mpidist import errors
from mpidist.buffers.compiling import can_compile
from strategy import rules
from strategy.optimizers import BY_NAME, Function, Optimizer
from strategy.proto import parameter_server_pb2 as pb
from strategy.rules import Kind, Rule, Update, element_by_element, on_arrays
from strategy.server.shard import Shard


class Configured:
    """An optimizer on a ps task: its update rule, and the numbers of each update.

    Args:
        definition: The definition that a worker has sent.
        server: Name of the ps task, for messages.

    Attributes:
        name: The name under which slots are kept.
        kind: The name of the optimizer's class.
        rule: The update rule.

    Raises:
        InvalidArgumentError: A hyperparameter is unknown or out of its range.
        UnimplementedError: The optimizer does not exist.
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
        """Return the numbers of an update; see :meth:`strategy.optimizers.Optimizer.numbers`.

        Args:
            step: Number of the update of the variable, from 1.
            rate: The worker's learning rate, if there is no schedule.

        Raises:
            InvalidArgumentError: The schedule raises an error, or returns an invalid rate.
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
    if optimizer.needs_all:
        shapes = optimizer.slot_shapes
        return Rule(on_arrays(formula), Kind.WHOLE, slots, optimizer.initial(), None, shapes)
    compiled = None
    if can_compile():
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
    """Return the class of an error and its message, if it has one."""
    return "".join(traceback.format_exception_only(error)).strip()


@dataclass(frozen=True)
class Plain:
    """A rule that is no optimizer, with the interface of :class:`Configured`.

    Attributes:
        name: The name under which steps are kept.
        rule: The update rule.
    """

    name: str
    rule: Rule

    def numbers_at(self, step: int, rate: float) -> Sequence[float]:
        """Return no numbers."""
        return ()


# The colon keeps these names apart from names of optimizers, which have none.
_PLAIN: dict[int, Plain] = {
    pb.ASSIGN: Plain(":assign", rules.ASSIGN),
    pb.ADD: Plain(":add", rules.ADD),
    pb.SUB: Plain(":sub", rules.SUB),
    pb.MUL: Plain(":mul", rules.MUL),
    pb.DIV: Plain(":div", rules.DIV),
    pb.MIN: Plain(":min", rules.MIN),
    pb.MAX: Plain(":max", rules.MAX),
}


@dataclass
class _Registered:
    """An optimizer that workers use.

    Attributes:
        optimizer: The optimizer.
        content: The serialized definition.
        uses: The connections with an optimizer of this definition, once for each.
    """

    optimizer: Configured
    content: bytes
    uses: list[int] = field(default_factory=list)


class Rules:
    """The update rules of a server: the plain rules (assign, add and the like), and optimizers.

    An optimizer is removed when no worker uses it any more. Its number is not used again.

    Args:
        server: Name of the server, for messages.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._next = int(pb.FIRST_OPTIMIZER)
        self._optimizers: dict[int, _Registered] = {}
        self._numbers: dict[bytes, int] = {}  # numbers of rules, by serialized definition

    def configure(self, asked: pb.ConfigureRequest) -> int:
        """Register an optimizer. Return the number of its rule.

        Raises:
            InvalidArgumentError: A hyperparameter is unknown or out of its range.
            UnimplementedError: The optimizer does not exist.
        """
        # Map fields have no fixed order.
        content = asked.optimizer.SerializeToString(deterministic=True)
        number = self._numbers.get(content)
        if number is None:
            optimizer = Configured(asked.optimizer, self._server)
            number = self._numbers[content] = self._next
            self._next += 1
            self._optimizers[number] = _Registered(optimizer, content)
        self._optimizers[number].uses.append(asked.connection)
        return number

    def drop(self, connection: int, numbers: Sequence[int]) -> None:
        """End one use of each optimizer by a connection."""
        for number in numbers:
            registered = self._optimizers.get(number)
            if registered is not None and connection in registered.uses:
                registered.uses.remove(connection)
                if not registered.uses:
                    del self._optimizers[number], self._numbers[registered.content]

    def forget(self, connection: int) -> None:
        """End all uses by a connection, which was closed."""
        for number, registered in list(self._optimizers.items()):
            self.drop(connection, [number] * registered.uses.count(connection))

    def find(self, number: int, shard: Shard) -> Plain | Configured:
        """Return the rule for changes of a variable.

        Args:
            number: Number of the rule in pushes.
            shard: The variable.

        Raises:
            InvalidArgumentError: There is no such rule, or it does not support the dtype.
        """
        dtype = shard.layout.dtype
        if number in _PLAIN:
            if number == pb.SUB and dtype == np.bool_:
                raise errors.InvalidArgumentError(
                    f"cannot subtract from variable {shard.name!r} of dtype bool: assign its value"
                )
            return _PLAIN[number]
        registered = self._optimizers.get(number)
        if registered is None:
            raise errors.InvalidArgumentError(f"{self._server} has no rule {number}")
        optimizer = registered.optimizer
        if not shard.layout.is_floating:
            raise errors.InvalidArgumentError(
                f"{optimizer.kind} cannot change variable {shard.name!r} of dtype {dtype}: "
                "optimizers need bfloat16, float16, float32 or float64"
            )
        return optimizer
