"""Application of received pushes to the variables of a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import Request, TaskMetrics, errors
from strategy.proto import parameter_server_pb2 as pb
from strategy.rules import FoundRule, Kind
from strategy.server.bucket import joined
from strategy.server.catalogue import Catalogue
from strategy.server.rules import Rules
from strategy.server.served import ServedConnection, ServedVariable
from strategy.server.shard import Scratch, mean_of_blocks
from strategy.shared.push_message import (
    INCREMENT,
    PLACES,
    ROWS,
    WHOLE,
    ArrayReader,
    Blocks,
    Entry,
    PushMessage,
    in_blocks,
    scattered,
    wire_dtype,
)

Array = NDArray[Any]


@dataclass(slots=True)
class ReceivedChange:
    """A change of one variable, or of one or more adjacent variables of a bucket.

    Attributes:
        variables: The variable or variables.
        rule: Number of the rule; see ``Rule`` in ``parameter_server.proto``.
        rate: The learning rate of an optimizer without a schedule.
        seen: Versions from which the change was computed, one for each variable.
        values: The values, flat, in the dtype in which they were sent. Large values have several
            slices.
        ids: Unique row numbers, int64; None unless the change is of rows.
        places: Element indices, ascending, int64; None unless the change is of single elements.
        increments: True if the change adds one to a variable of one element.
        in_bucket: True if the rule may update the memory of the bucket. False for a variable that
            must be updated by itself.
    """

    variables: Sequence[ServedVariable]
    rule: int
    rate: float
    seen: Sequence[int]
    values: Sequence[Array]
    ids: Array | None = None
    places: Array | None = None
    increments: bool = False
    in_bucket: bool = False

    @property
    def kind(self) -> tuple[list[int], bool]:
        """The variables, and True for rows; the same for all members of a step."""
        return [variable.identity for variable in self.variables], self.ids is not None

    def blocks(self) -> Blocks:
        """Return the values of the whole variable, block by block."""
        layout = self.variables[0].shard.layout
        if self.places is not None:
            return scattered(self.places, self.values[0], layout.size)
        return in_blocks(self.values, layout.dtype)

    def rows(self) -> tuple[Array, Array]:
        """Return the row numbers and the flat values of the rows."""
        assert self.ids is not None
        dtype = self.variables[0].shard.layout.dtype
        return self.ids, self.values[0].astype(dtype, copy=False)

    def divided(self) -> list[ReceivedChange]:
        """Return one change for each variable."""
        changes, start = [], 0
        for variable, seen in zip(self.variables, self.seen, strict=True):
            end = start + variable.shard.layout.size
            values = (self.values[0][start:end],)
            changes.append(ReceivedChange((variable,), self.rule, self.rate, (seen,), values))
            start = end
        return changes


@dataclass(slots=True, eq=False)
class ReceivedPush:
    """A push with its changes.

    Attributes:
        message: The message.
        connection: The connection of the worker.
        request: The request. The server replies when the push has been applied.
        changes: The changes, in order.
        problem: The error if the arrays do not fit the message.
        begun: True once the push is being applied or waits for the other members of its step.
    """

    message: PushMessage
    connection: ServedConnection
    request: Request
    changes: Sequence[ReceivedChange] = ()
    problem: errors.InvalidArgumentError | None = None
    begun: bool = False


def read_changes(
    entries: Sequence[Entry], arrays: Sequence[Array], variables: Sequence[ServedVariable]
) -> list[ReceivedChange]:
    """Return the changes of a push. Adjacent small variables share one change.

    Args:
        entries: The entries of the message.
        arrays: The arrays of all PushSlice messages, then of the push message.
        variables: The variables of the server, by number.

    Raises:
        InvalidArgumentError: The arrays do not fit the message.
    """
    reader = ArrayReader(arrays)
    changes: list[ReceivedChange] = []
    begin = 0
    while begin < len(entries):
        first = entries[begin]
        variable, end = variables[first[0]], begin + 1
        span = variable.shard.span
        if span is None or first[4] != WHOLE or first[5]:
            changes.append(_single(first, variable, reader))
            begin = end
            continue
        adjacent, size = [variable], span.size
        while end < len(entries) and _is_alike(entries[end], first):
            variable = variables[entries[end][0]]
            following = variable.shard.span
            if following is None or not following.comes_after(span):
                break
            span = following
            adjacent.append(variable)
            size += span.size
            end += 1
        values = reader.joined_values(adjacent[0].shard.layout.dtype, size)
        seen = [entry[2] for entry in entries[begin:end]]
        change = ReceivedChange(adjacent, first[1], first[3], seen, (values,), in_bucket=True)
        changes.append(change)
        begin = end
    return changes


def _is_alike(entry: Entry, first: Entry) -> bool:
    """Return whether two entries have the same rule, learning rate, kind and dtype."""
    return entry[1] == first[1] and entry[3:] == first[3:]


def _single(entry: Entry, variable: ServedVariable, reader: ArrayReader) -> ReceivedChange:
    _, rule, seen, rate, kind, wire = entry
    layout = variable.shard.layout
    dtype = wire_dtype(wire, layout.dtype)
    change = ReceivedChange((variable,), rule, rate, (seen,), ())
    if kind == ROWS:
        change.ids = reader.numbers()
        width = layout.size // max(layout.shape[0], 1) if layout.shape else 0
        change.values = (reader.values(dtype, change.ids.size * width),)
    elif kind == PLACES:
        change.places = reader.numbers()
        change.values = (reader.values(dtype, change.places.size),)
    elif kind == INCREMENT:
        change.increments = True
    else:
        change.values = reader.slices(dtype, layout.size)
    return change


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
        # Overflow gives infinite values without a warning: users do not look at a server's log.
        with np.errstate(all="ignore"):
            for changes in zip(*[push.changes for push in batch], strict=True):
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
        """Divide a change of a bucket, unless the rule can update its variables together."""
        first = changes[0]
        if not first.in_bucket:
            return [changes]
        name, rule = self._rules.rule_of(first.rule)
        steps = {variable.shard.steps.get(name, 0) for variable in first.variables}
        if len(steps) == 1 and rule.kind in (Kind.PLAIN, Kind.OPTIMIZER):
            if not rule.slots:
                return [changes]
            with suppress(errors.ResourceExhaustedError):  # the single changes raise it
                slots = [
                    variable.shard.slot(f"{name}/{slot}", rule.initial.get(slot, 0.0))
                    for slot in rule.slots
                    for variable in first.variables
                ]
                # Slots from a checkpoint may have another dtype, and then lie outside the bucket.
                if all(slot.dtype == first.values[0].dtype for slot in slots):
                    return [changes]
        return list(zip(*[change.divided() for change in changes], strict=True))

    def _change(self, changes: Sequence[ReceivedChange], outcomes: Sequence[Outcome]) -> None:
        """Apply a change, and record versions and staleness."""
        first = changes[0]
        variables = first.variables
        shard = variables[0].shard
        found = self._rules.find(first.rule, first.rate, shard)
        self._count(changes, outcomes)
        if first.increments:
            shard.increment()
        elif first.in_bucket:
            self._change_bucket(changes, found)
        elif first.ids is not None:
            if found[1].kind is Kind.WHOLE:
                raise errors.InvalidArgumentError(
                    f"optimizer {found[0]!r} cannot update rows of variable {shard.name!r}: it "
                    "needs the gradient of the whole variable"
                )
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
        gradient = changes[0].values[0]
        if len(changes) > 1:
            gradients = [iter(change.values) for change in changes]
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
