"""The rules by which a server changes variables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpidist import Reply, Request, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.rules import rule as rules
from strategy.rules.rule import FoundRule, Rule
from strategy.server.configured import Configured
from strategy.server.owned_shard import OwnedShard

# Their names are no optimizer's, which have no colon.
_PLAIN: Mapping[int, tuple[str, Rule]] = {
    pb.ASSIGN: (":assign", rules.ASSIGN),
    pb.ADD: (":add", rules.ADD),
    pb.SUB: (":sub", rules.SUB),
    pb.MUL: (":mul", rules.MUL),
    pb.DIV: (":div", rules.DIV),
    pb.MIN: (":min", rules.MIN),
    pb.MAX: (":max", rules.MAX),
}


class Rules:
    """The rules by which a server changes variables: the plain ones, and optimizers.

    Args:
        server: Name of the server, for messages.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._optimizers: list[Configured] = []
        self._numbers: dict[bytes, int] = {}  # of optimizers, by what workers say of them

    def configure(self, request: Request) -> Reply:
        """Local. A worker tells of an optimizer."""
        asked = pb.OptimizerDef.FromString(request.body)
        content = asked.SerializeToString(deterministic=True)  # numbers come in any order
        number = self._numbers.get(content)
        if number is None:
            self._optimizers.append(Configured(asked, self._server))
            number = pb.FIRST_OPTIMIZER + len(self._optimizers) - 1
            self._numbers[content] = number
        return Reply(pb.ConfigureReply(rule=number).SerializeToString())

    def rule_of(self, number: int) -> tuple[str, Rule]:
        """Return the name for slots and steps of a rule, and the rule."""
        if number in _PLAIN:
            return _PLAIN[number]
        optimizer = self._optimizers[number - pb.FIRST_OPTIMIZER]
        return optimizer.name, optimizer.rule

    def find(self, number: int, rate: float, shard: OwnedShard) -> FoundRule:
        """Return a rule with its numbers for the next change of a variable.

        Args:
            number: Number of the rule.
            rate: The learning rate of an optimizer without a schedule.
            shard: The variable.

        Raises:
            InvalidArgumentError: The rule does not take the dtype, or a schedule fails.
        """
        dtype = shard.layout.dtype
        if number in _PLAIN:
            if number == pb.SUB and dtype == np.bool_:
                raise errors.InvalidArgumentError(
                    f"cannot subtract from variable {shard.name!r} of dtype bool: assign its value"
                )
            return *_PLAIN[number], ()
        optimizer = self._optimizers[number - pb.FIRST_OPTIMIZER]
        if not shard.layout.is_floating:
            raise errors.InvalidArgumentError(
                f"{optimizer.kind} cannot change variable {shard.name!r} of dtype {dtype}: "
                "optimizers need bfloat16, float16, float32 or float64"
            )
        step = shard.steps.get(optimizer.name, 0) + 1
        return optimizer.name, optimizer.rule, optimizer.numbers_at(step, rate)
