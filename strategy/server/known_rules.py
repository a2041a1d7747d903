"""The rules by which a server changes variables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpidist import Reply, Request, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.configured import Configured
from strategy.server.owned_shard import OwnedShard
from strategy.shared import kernels

# Their names are no optimizer's, which have no colon.
_PLAIN: Mapping[int, tuple[str, kernels.Rule]] = {
    pb.ASSIGN: (":assign", kernels.ASSIGN),
    pb.ADD: (":add", kernels.ADD),
    pb.SUB: (":sub", kernels.SUB),
    pb.MUL: (":mul", kernels.MUL),
    pb.DIV: (":div", kernels.DIV),
    pb.MIN: (":min", kernels.MIN),
    pb.MAX: (":max", kernels.MAX),
}


class Rules:
    """The rules by which a server changes variables: the plain ones, and optimizers.

    Args:
        who: The server, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._optimizers: list[Configured] = []
        self._numbers: dict[bytes, int] = {}  # of optimizers, by what workers say of them

    def configure(self, request: Request) -> Reply:
        """Local. A worker tells of an optimizer."""
        asked = pb.OptimizerDef.FromString(request.body)
        content = asked.SerializeToString(deterministic=True)  # numbers come in any order
        number = self._numbers.get(content)
        if number is None:
            self._optimizers.append(Configured(asked, self._who))
            number = pb.FIRST_OPTIMIZER + len(self._optimizers) - 1
            self._numbers[content] = number
        return Reply(pb.ConfigureReply(rule=number).SerializeToString())

    def may_join(self, number: int) -> bool:
        """Local. Whether the rule of this number may be called for several variables at once."""
        if number in _PLAIN:
            return True
        return self._optimizers[number - pb.FIRST_OPTIMIZER].rule.joins

    def find(
        self, entry: pb.PushEntry, shard: OwnedShard
    ) -> tuple[str, kernels.Rule, Mapping[str, float]]:
        """Local. The rule of a change for a shard: its name, itself, its numbers for this step.

        Raises:
            InvalidArgumentError: The shard's dtype does not do, or a schedule fails.
        """
        number, dtype = entry.rule, shard.layout.dtype
        if number in _PLAIN:
            if number == pb.SUB and dtype == np.bool_:
                raise errors.InvalidArgumentError(
                    f"cannot subtract from variable {shard.name!r} of dtype bool: assign its value"
                )
            return *_PLAIN[number], {}
        optimizer = self._optimizers[number - pb.FIRST_OPTIMIZER]
        if not shard.layout.is_floating:
            raise errors.InvalidArgumentError(
                f"{optimizer.kind} cannot change variable {shard.name!r} of dtype {dtype}: "
                "optimizers need bfloat16, float16, float32 or float64"
            )
        if entry.scaled:
            return optimizer.name, kernels.SUB, {}
        step = shard.steps.get(optimizer.name, 0) + 1
        return optimizer.name, optimizer.rule, optimizer.values_at(step)
