"""Application of pushes to the variables of a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from numpy.typing import NDArray

from mpidist import TaskMetrics, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.rules.rule import FoundRule, Kind
from strategy.server.bucket import joined
from strategy.server.catalogue import Catalogue
from strategy.server.known_rules import Rules
from strategy.server.means import mean_of_blocks
from strategy.server.received import ReceivedChange, ReceivedPush
from strategy.server.scratch import Scratch
from strategy.server.served import ServedVariable

Array = NDArray[Any]


class Outcome:
    """The result of a push: the version after each change, and the staleness of each change."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.staleness: list[int] = []


class Applier:
    """Applier of pushes. The pushes of a synchronous step are applied as one change.

    Args:
        server: Name of the server, for messages.
        catalogue: The variables of the server.
        rules: The update rules.
        metrics: The metrics of the server.
    """

    def __init__(
        self, server: str, catalogue: Catalogue, rules: Rules, metrics: TaskMetrics
    ) -> None:
        self._server = server
        self._catalogue = catalogue
        self._rules = rules
        self._metrics = metrics
        self._sums = Scratch()

    def apply(self, batch: Sequence[ReceivedPush]) -> list[Outcome]:
        """Apply one push, or the mean of the pushes of a synchronous step.

        Args:
            batch: Pushes of different workers with changes of the same variables.

        Returns:
            The outcome of each push.

        Raises:
            InternalError: The pushes do not change the same variables.
            InvalidArgumentError: The arrays of a push do not fit its message.
            Exception: The first error of a rule. The other changes have been applied.
        """
        for push in batch:
            if push.problem is not None:
                raise push.problem
        self._check_alike(batch)
        outcomes = [Outcome() for _ in batch]
        problem: BaseException | None = None
        for changes in zip(*(push.changes for push in batch), strict=True):
            try:
                parts = self._alike(changes)
            except Exception as error:  # no memory for slots
                problem = problem or error
                continue
            for each in parts:
                try:
                    self._change(each, outcomes)
                except (Exception, SystemExit) as error:  # a user's function may raise either
                    problem = problem or error
        if problem is not None:
            raise problem
        return outcomes

    def _check_alike(self, batch: Sequence[ReceivedPush]) -> None:
        if len(batch) == 1:
            return
        kinds = [(push.message.step, [change.kind for change in push.changes]) for push in batch]
        if any(kind != kinds[0] for kind in kinds):
            raise errors.InternalError(
                f"{self._server} got pushes that do not form a step: {kinds}"
            )

    def _alike(self, changes: tuple[ReceivedChange, ...]) -> Sequence[tuple[ReceivedChange, ...]]:
        """Divide a change of several variables unless the rule can change them together."""
        first = changes[0]
        if len(first.variables) == 1:
            return [changes]
        name, rule = self._rules.rule_of(first.rule)
        steps = {variable.shard.steps.get(name, 0) for variable in first.variables}
        if len(steps) == 1 and rule.kind is not Kind.FUNCTION:
            with suppress(errors.ResourceExhaustedError):  # the single changes report it
                slots = [
                    variable.shard.slot(f"{name}/{slot}", rule.initial.get(slot, 0.0))
                    for slot in rule.slots
                    for variable in first.variables
                ]
                # A checkpoint may have had slots of another dtype, which lie elsewhere.
                if all(slot.dtype == first.values[0].dtype for slot in slots):
                    return [changes]
        return list(zip(*(change.divided() for change in changes), strict=True))

    def _change(self, changes: Sequence[ReceivedChange], outcomes: Sequence[Outcome]) -> None:
        """Apply a change, and record versions and staleness."""
        first = changes[0]
        variables = first.variables
        found = self._rules.find(first.rule, first.rate, variables[0].shard)
        self._count(changes, outcomes)
        shard = variables[0].shard
        if len(variables) > 1:
            self._change_bucket(changes, found)
        elif first.ids is not None:
            shard.apply_mean_of_rows(*found, [change.rows() for change in changes])
        else:
            each = [change.blocks() for change in changes]
            shard.apply(*found, mean_of_blocks(each, shard.layout, self._sums))
        self._finish(variables, outcomes)

    def _count(self, changes: Sequence[ReceivedChange], outcomes: Sequence[Outcome]) -> None:
        """Record the staleness of changes before they are applied."""
        versions = [variable.shard.version for variable in changes[0].variables]
        total = 0
        for change, outcome in zip(changes, outcomes, strict=True):
            late = [v - min(seen, v) for v, seen in zip(versions, change.seen, strict=True)]
            outcome.staleness += late
            total += sum(late)
        if changes[0].rule >= pb.FIRST_OPTIMIZER:
            self._metrics.values["changes"] += len(versions) * len(changes)
            self._metrics.values["staleness"] += total

    def _change_bucket(self, changes: Sequence[ReceivedChange], found: FoundRule) -> None:
        """Change adjacent variables of a bucket together."""
        shards = [variable.shard for variable in changes[0].variables]
        spans = [shard.span for shard in shards if shard.span is not None]
        gradients = [iter((change.values[0],)) for change in changes]
        (gradient,) = mean_of_blocks(gradients, shards[0].layout, self._sums)
        try:
            spans[0].bucket.change(*joined(spans), found, gradient)
        finally:
            name = found[0]
            step = shards[0].steps.get(name, 0) + 1
            for shard in shards:
                shard.steps[name] = step

    def _finish(self, variables: Sequence[ServedVariable], outcomes: Sequence[Outcome]) -> None:
        """Record the new versions, and answer workers that wait for an initial value."""
        versions = [variable.shard.version for variable in variables]
        for outcome in outcomes:
            outcome.versions += versions
        for variable in variables:
            if variable.waiting:
                self._catalogue.answer_waiting(variable)
