"""An optimizer, as a server has it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from mpidist import errors
from mpidist.buffers.compiling import can_compile
from strategy.proto import parameter_server_pb2 as pb
from strategy.shared.kernels import FUNCTION, PIECE, Piece, Rule
from strategy.shared.rules import RULES


class Configured:
    """Local. The rule that a worker has asked for, and its numbers at each step.

    Args:
        asked: The worker's description.
        who: The server's name, for messages.

    Attributes:
        name: Under which its slots are kept.
        kind: Name of its class.
        rule: How it changes variables.

    Raises:
        InvalidArgumentError: A number is missing.
        UnimplementedError: There is no such optimizer.
    """

    def __init__(self, asked: pb.OptimizerDef, who: str) -> None:
        self.name, self.kind = asked.name, asked.kind
        self._values = dict(asked.values)
        self._schedule: Callable[[int], float] | None = None
        if asked.schedule:
            self._schedule = cloudpickle.loads(asked.schedule)
        if asked.function:
            function = cloudpickle.loads(asked.function)
            self.rule = _rule_of(self.name, function, tuple(asked.slots))
        elif asked.kind in RULES:
            try:
                self.rule = _fastest(asked.kind, self._values)
            except KeyError as error:
                raise errors.InvalidArgumentError(
                    f"{asked.kind} needs a value of {error}"
                ) from None
        else:
            known = ", ".join(RULES)
            raise errors.UnimplementedError(
                f"{who} has no optimizer {asked.kind!r}; it knows {known}"
            )

    def values_at(self, step: int) -> Mapping[str, float]:
        """Local. Its numbers for an update of a variable, the first of which is step 1."""
        if self._schedule is None:
            return self._values
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
        return self._values | {"learning_rate": rate}


def _fastest(kind: str, values: Mapping[str, float]) -> Rule:
    """The compiled rule where numba is installed."""
    if not can_compile():
        return RULES[kind](values)
    from strategy.shared.fused import (
        fused,  # takes half a second, and a server of no optimizer none
    )

    return fused(kind, values)


def _rule_of(name: str, function: Callable[..., Any], slots: tuple[str, ...]) -> Rule:
    """The rule that calls a user's function."""
    half_changed = "the variable may be half changed"

    def update(piece: Piece) -> None:
        kept = dict(zip(slots, piece.slots, strict=True))
        rate = piece.values["learning_rate"]
        try:
            result = function(piece.param, piece.grad, kept, rate, piece.step)
        except Exception as error:
            raise errors.InvalidArgumentError(
                f"the function of optimizer {name!r}, called with (param, grad, slots, "
                f"learning_rate, step), raised {_text(error)}; {half_changed}"
            ) from error
        if result is not None or any(
            kept.get(key) is not slot for key, slot in zip(slots, piece.slots, strict=True)
        ):
            raise errors.InvalidArgumentError(
                f"the function of optimizer {name!r} must change param and slots in place "
                f"(param -= ..., slots['m'][:] = ...) and return nothing; {half_changed}"
            )

    return Rule(slots, 0, PIECE, update, wide=True, joins=False, kind=FUNCTION)


def _text(error: Exception) -> str:
    """An error in words, also one that has none."""
    return "".join(traceback.format_exception_only(error)).strip()
