"""Pushes on a server: their order, their steps, and their application to variables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import LATER, Reply, Request, TaskMetrics, errors
from strategy.checkpoints.cut import Cut, Key
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.push_message import (
    ELEMENTS,
    INCREMENT,
    ROWS,
    WHOLE,
    ArrayReader,
    Blocks,
    Entry,
    PushMessage,
    in_blocks,
    pack_reply,
    scattered,
    unpack_entries,
    wire_dtype,
)
from strategy.rules import FoundRule, Kind
from strategy.server.rules import Configured, Plain, Rules
from strategy.server.shard import Neighbors, Scratch, Shard, mean_of_blocks
from strategy.server.variable_store import ServedConnection, Training, VariableEntry, VariableStore

Array = NDArray[Any]


@dataclass(slots=True, eq=False)
class Target:
    """The constant facts of a change: the same for all pushes with the same entries.

    Attributes:
        variables: One variable, or adjacent variables of a bucket.
        how: The rule.
        kind: The kind of the change; see ``WHOLE``.
        dtype: The dtype in which the values are sent.
        size: Number of elements of the variables.
        neighbors: The variables of a bucket, for whole values in their dtype; else None. The rule
            may still need an update for each variable.
    """

    variables: Sequence[VariableEntry]
    how: Plain | Configured
    kind: int
    dtype: np.dtype[Any]
    size: int
    neighbors: Neighbors | None = None

    @property
    def what(self) -> tuple[list[int], bool]:
        """The variables, and True for rows; the same for all members of a step."""
        return [variable.identity for variable in self.variables], self.kind == ROWS

    def divided(self) -> list[Target]:
        """Return one target for each variable."""
        return [
            Target((one,), self.how, self.kind, self.dtype, one.shard.layout.size)
            for one in self.variables
        ]

    def can_update_together(self) -> bool:
        """Return whether one call of the rule can update the neighbors, if there are any."""
        name, rule = self.how.name, self.how.rule
        if self.neighbors is None or rule.kind not in (Kind.PLAIN, Kind.OPTIMIZER):
            return False
        if len({variable.shard.steps.get(name, 0) for variable in self.variables}) > 1:
            return False
        try:
            slots = [
                variable.shard.slot(f"{name}/{slot}", rule.initial.get(slot, 0.0))
                for slot in rule.slots
                for variable in self.variables
            ]
        except errors.ResourceExhaustedError:  # the updates of single variables raise it
            return False
        # Slots from a checkpoint may have another dtype, and then lie outside the bucket.
        return all(slot.dtype == self.dtype for slot in slots)


@dataclass(slots=True, eq=False)
class ReceivedChange:
    """A change of one variable, or of adjacent variables of a bucket.

    Attributes:
        target: The constant facts.
        rate: The learning rate of an optimizer without a schedule.
        seen: For each variable, the version that it has if no other worker has pushed since the
            pull.
        values: The values, flat, in the dtype in which they were sent. Large values have several
            slices.
        ids: Unique row numbers, int64; None unless the change is of rows.
        element_ids: Indices of single elements, ascending, int64; None unless the change is of
            single elements.
    """

    target: Target
    rate: float
    seen: Sequence[int]
    values: Sequence[Array] = ()
    ids: Array | None = None
    element_ids: Array | None = None

    def blocks(self) -> Blocks:
        """Return the values of the whole variable, block by block."""
        layout = self.target.variables[0].shard.layout
        if self.element_ids is not None:
            return scattered(self.element_ids, self.values[0], layout.size)
        return in_blocks(self.values, layout.dtype)

    def rows(self) -> tuple[Array, Array]:
        """Return the row numbers and the flat values of the rows."""
        assert self.ids is not None
        dtype = self.target.variables[0].shard.layout.dtype
        return self.ids, self.values[0].astype(dtype, copy=False)

    def divided(self) -> list[ReceivedChange]:
        """Return one change for each variable."""
        changes, start = [], 0
        for target, seen in zip(self.target.divided(), self.seen, strict=True):
            end = start + target.size
            changes.append(ReceivedChange(target, self.rate, (seen,), (self.values[0][start:end],)))
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
        problem: The error if the push is not valid.
        begun: True once the push is being applied or waits for the other members of its step.
    """

    message: PushMessage
    connection: ServedConnection
    request: Request
    changes: Sequence[ReceivedChange] = ()
    problem: errors.InvalidArgumentError | None = None
    begun: bool = False


_MAX_TARGETS = 256


class TargetCache:
    """The targets of recent pushes, by the entries of their messages.

    Most pushes change the same variables as an earlier push. Variables are never removed from the
    server, and numbers of rules are not used again, so the targets stay valid.

    Args:
        variables: The variables of the server, by number.
        rules: The update rules.
    """

    def __init__(self, variables: Sequence[VariableEntry], rules: Rules) -> None:
        self._variables = variables
        self._rules = rules
        self._known: dict[bytes, list[Target]] = {}

    def targets(self, entries: bytes) -> list[Target]:
        """Return the targets of a push. Adjacent small variables share one target.

        Args:
            entries: The entries of the message.

        Raises:
            InvalidArgumentError: There is no such variable or rule, or the rule or the kind does
                not fit the variable.
        """
        known = self._known.get(entries)
        if known is None:
            if len(self._known) >= _MAX_TARGETS:
                self._known.clear()
            known = self._known[entries] = self._grouped(unpack_entries(entries))
        return known

    def clear(self) -> None:
        """Drop all targets, which keep rules alive that workers no longer use."""
        self._known.clear()

    def _grouped(self, entries: Sequence[Entry]) -> list[Target]:
        targets: list[Target] = []
        begin = 0
        while begin < len(entries):
            number, *how = entries[begin]
            rule, kind, wire = how
            variables = [self._variable(number)]
            shard = variables[0].shard
            layout = shard.layout
            is_number = layout.shape == () and layout.dtype == np.int64
            if kind == INCREMENT and not (rule == pb.ADD and is_number):
                raise errors.InvalidArgumentError(
                    f"a push increments variable {shard.name!r} of shape {layout.shape} and "
                    f"{layout.dtype}: only the global step can be incremented"
                )
            target = Target(
                variables,
                self._rules.find(rule, shard),
                kind,
                wire_dtype(wire, layout.dtype),
                layout.size,
            )
            targets.append(target)
            begin += 1
            if shard.span is None or kind != WHOLE or wire:
                continue
            spans = [shard.span]
            for number, *others in entries[begin:]:
                following = self._variable(number)
                span = following.shard.span
                if others != how or span is None or not span.comes_after(spans[-1]):
                    break
                variables.append(following)
                spans.append(span)
                target.size += span.size
            target.neighbors = Neighbors(spans)
            begin += len(spans) - 1
        return targets

    def _variable(self, number: int) -> VariableEntry:
        if number >= len(self._variables):
            raise errors.InvalidArgumentError(
                f"a push changes variable {number}, and there are {len(self._variables)}"
            )
        return self._variables[number]


def read_changes(
    message: PushMessage, targets: Sequence[Target], arrays: Sequence[Array]
) -> list[ReceivedChange]:
    """Return the changes of a push.

    Args:
        message: The message.
        targets: The targets of its entries.
        arrays: The arrays of all PushSlice messages, then of the push message.

    Raises:
        InvalidArgumentError: The arrays do not fit the message.
    """
    reader = ArrayReader(arrays)
    changes: list[ReceivedChange] = []
    begin = 0
    for target in targets:
        end = begin + len(target.variables)
        change = ReceivedChange(target, message.rates[begin], message.seen[begin:end])
        if target.neighbors is not None:
            change.values = (reader.joined_values(target.dtype, target.size),)
        elif target.kind != INCREMENT:
            _read_values(change, reader)
        changes.append(change)
        begin = end
    reader.check_end()
    return changes


def _read_values(change: ReceivedChange, reader: ArrayReader) -> None:
    """Read the values of a change of a single variable."""
    target = change.target
    layout = target.variables[0].shard.layout
    if target.kind == ROWS:
        change.ids = reader.numbers()
        width = layout.size // max(layout.shape[0], 1) if layout.shape else 0
        change.values = (reader.values(target.dtype, change.ids.size * width),)
    elif target.kind == ELEMENTS:
        change.element_ids = ids = reader.numbers()
        if ids.size and not 0 <= ids.min() <= ids.max() < layout.size:
            raise errors.InvalidArgumentError(
                f"a push changes elements that variable {target.variables[0].shard.name!r} lacks"
            )
        change.values = (reader.values(target.dtype, change.element_ids.size),)
    else:
        change.values = reader.slices(target.dtype, layout.size)


class Outcome:
    """The result of a push: the version after each change, and the staleness of each change."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.staleness: list[int] = []


class Applier:
    """Applier of pushes. The pushes of a synchronous step are applied as one change.

    Args:
        server: Name of the server, for messages.
        store: The variables of the server.
        metrics: The metrics of the server.
    """

    def __init__(self, server: str, store: VariableStore, metrics: TaskMetrics) -> None:
        self._server = server
        self._store = store
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
            InvalidArgumentError: A push is not valid. Nothing has been applied.
            Exception: The first error of a rule. The other changes have been applied.
        """
        for push in batch:
            if push.problem is not None:
                raise push.problem
        if len(batch) > 1:
            self._check_alike(batch)
        outcomes = [Outcome() for _ in batch]
        problem: BaseException | None = None
        # Overflow gives infinite values without a warning: users do not look at a server's log.
        with np.errstate(all="ignore"):
            for changes in zip(*[push.changes for push in batch], strict=True):
                parts: Iterable[Sequence[ReceivedChange]] = (changes,)
                together = changes[0].target.can_update_together()
                if not together and changes[0].target.neighbors is not None:
                    parts = zip(*[change.divided() for change in changes], strict=True)
                for each in parts:
                    try:
                        self._change(each, outcomes)
                    except (Exception, SystemExit) as error:  # a user's function may raise either
                        problem = problem or error
        if problem is not None:
            raise problem
        return outcomes

    def _check_alike(self, batch: Sequence[ReceivedPush]) -> None:
        kinds = [
            (push.message.step, [change.target.what for change in push.changes]) for push in batch
        ]
        if any(kind != kinds[0] for kind in kinds):
            raise errors.InternalError(
                f"{self._server} got pushes that do not form a step: {kinds}"
            )

    def _change(self, changes: Sequence[ReceivedChange], outcomes: Sequence[Outcome]) -> None:
        """Apply a change, and record versions and staleness."""
        first, target = changes[0], changes[0].target
        shard, how = target.variables[0].shard, target.how
        for snapshot in self._store.snapshots.values():
            for variable in target.variables:
                snapshot.copy(variable.shard.name)
        versions = tuple([variable.shard.version for variable in target.variables])
        self._count(changes, versions, outcomes)
        if target.kind == INCREMENT:
            shard.increment()
        else:
            step = shard.steps.get(how.name, 0) + 1
            found = how.name, how.rule, how.numbers_at(step, first.rate)
            if target.neighbors is not None:
                self._change_neighbors(target.neighbors, changes, found, step)
            elif first.ids is not None:
                self._change_rows(shard, changes, found)
            else:
                each = [change.blocks() for change in changes]
                shard.apply(*found, mean_of_blocks(each, shard.layout, self._sums))
        after = [version + 1 for version in versions]
        for outcome in outcomes:
            outcome.versions += after
        for variable in target.variables:
            if variable.waiting:  # for the initial value
                self._store.answer_waiting(variable)

    def _count(
        self,
        changes: Sequence[ReceivedChange],
        versions: Sequence[int],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Record the staleness of changes before they are applied."""
        total = 0
        for change, outcome in zip(changes, outcomes, strict=True):
            if change.seen == versions:
                outcome.staleness += [0] * len(versions)
                continue
            late = [v - min(seen, v) for v, seen in zip(versions, change.seen, strict=True)]
            outcome.staleness += late
            total += sum(late)
        if isinstance(changes[0].target.how, Configured):
            self._metrics.values["changes"] += len(versions) * len(changes)
            self._metrics.values["staleness"] += total

    def _change_neighbors(
        self,
        neighbors: Neighbors,
        changes: Sequence[ReceivedChange],
        found: FoundRule,
        step: int,
    ) -> None:
        """Change adjacent variables of a bucket together."""
        variables, gradient = changes[0].target.variables, changes[0].values[0]
        if len(changes) > 1:
            gradients = [iter(change.values) for change in changes]
            (gradient,) = mean_of_blocks(gradients, variables[0].shard.layout, self._sums)
        try:
            neighbors.change(found, gradient)
        finally:
            for variable in variables:
                variable.shard.steps[found[0]] = step

    def _change_rows(
        self, shard: Shard, changes: Sequence[ReceivedChange], found: FoundRule
    ) -> None:
        if found[1].kind is Kind.WHOLE:
            raise errors.InvalidArgumentError(
                f"optimizer {found[0]!r} cannot update rows of variable {shard.name!r}: it needs "
                "the gradient of the whole variable"
            )
        shard.apply_mean_of_rows(*found, [change.rows() for change in changes])


@dataclass
class _Steps:
    """The synchronous steps of strategies that train together.

    Attributes:
        over: Number of steps that were applied or have failed.
        given: Pushes that wait for the other members of their step, by step and worker.
        failed: The reason of each failed step, by step.
        waiting: Waiting requests, each with the number of steps that must be over.
    """

    over: int = 0
    given: dict[int, dict[int, ReceivedPush]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    waiting: list[tuple[int, Request]] = field(default_factory=list)


class Pushes:
    """Queue of the pushes to a server.

    Pushes that belong to a synchronous step are applied together. Other pushes are applied one by
    one. A push is applied as soon as all of its messages have arrived, unless

    - the pushes of other members of its step are missing,
    - an earlier push of its connection waits, or
    - a checkpoint holds it.

    Handlers apply whole pushes, so no variable is half changed between two requests.

    Args:
        server: Name of the server, for messages.
        store: The variables and connections of the server.
        rules: The update rules.
        metrics: The metrics of the server.
        forget: Called with the number of a connection that was closed, and its strategy.
    """

    def __init__(
        self,
        server: str,
        store: VariableStore,
        rules: Rules,
        metrics: TaskMetrics,
        forget: Callable[[int, str], None],
    ) -> None:
        self._server = server
        self._store = store
        self._applier = Applier(server, store, metrics)
        self._rules = rules
        self._targets = TargetCache(store.variables, rules)
        self._metrics = metrics
        self._steps: dict[Training, _Steps] = {}
        self._cut: Cut | None = None
        self._forget = forget
        self._continuing = self._continue_again = False

    def configure(self, request: Request) -> Reply:
        """Register an optimizer. Drop the optimizers that no longer exist at the worker."""
        asked = pb.ConfigureRequest.FromString(request.body)
        if asked.dropped:
            self._rules.drop(asked.connection, asked.dropped)
            self._targets.clear()
        return Reply(pb.ConfigureReply(rule=self._rules.configure(asked)).SerializeToString())

    def take_slice(self, request: Request) -> None:
        """Keep a slice of a large push until the push arrives."""
        asked = pb.SliceRequest.FromString(request.body)
        connection = self._store.connections[asked.connection]
        if asked.index == 0:  # older slices belong to an interrupted push
            connection.slices.clear()
        if asked.index != len(connection.slices):
            raise errors.InternalError(
                f"{self._server} got slice {asked.index} of a push of worker "
                f"{connection.worker}, and expected {len(connection.slices)}"
            )
        connection.slices.append(request.buffers)
        self._metrics.values["in_bytes"] += sum([buffer.nbytes for buffer in request.buffers])

    def collected(
        self, number: int, count: int, last: Sequence[NDArray[np.uint8]]
    ) -> list[NDArray[np.uint8]]:
        """Return all arrays of a sliced message, and clear the buffer.

        Args:
            number: Number of the connection.
            count: Number of slices before the last message. If it is 0, buffered slices of an
                interrupted push are discarded.
            last: The arrays of the last message.
        """
        connection = self._store.connections[number]
        slices, connection.slices = connection.slices, []
        if count not in (0, len(slices)):
            raise errors.InternalError(
                f"{self._server} got {len(slices)} slices of worker {connection.worker}, and "
                f"expected {count}"
            )
        return [array for arrays in slices[:count] for array in arrays] + list(last)

    def push(self, request: Request) -> Reply:
        """Queue a push. The reply is sent when the push has been applied."""
        message = PushMessage.unpack(request.body)
        connection = self._store.connections[message.connection]
        arrays = request.buffers
        if message.slices or connection.slices:
            arrays = self.collected(message.connection, message.slices, arrays)
        if message.sequence <= connection.sequence:
            raise errors.InternalError(
                f"{self._server} got push {message.sequence} of worker {connection.worker} after "
                f"push {connection.sequence}"
            )
        connection.sequence = message.sequence
        push = ReceivedPush(message, connection, request)
        try:
            targets = self._targets.targets(message.entries)
            push.changes = read_changes(message, targets, arrays)
        except errors.InvalidArgumentError as error:
            push.problem = error  # raised in its turn, since the other members of the step wait
        connection.unfinished.append(push)
        values = self._metrics.values
        values["queued"] += 1
        for buffer in request.buffers:
            values["in_bytes"] += buffer.nbytes
        self._begin_next(connection)
        return LATER

    def detach(self, request: Request) -> None:
        """Forget the connection of a strategy that a worker has closed, after its last push."""
        number = pb.AttachReply.FromString(request.body).connection
        self._store.connections[number].is_closed = True
        self._forget_if_closed(number)
        self._continue()  # a save may have waited for pushes of this connection

    def hold(self, request: Request) -> Reply:
        """Hold all pushes until a save names the pushes that it includes."""
        asked = pb.HoldRequest.FromString(request.body)
        # A worker saves one checkpoint at a time. If its connection holds pushes for another save,
        # that save was interrupted, and its release was not sent.
        if self._cut is not None and self._cut.owner != asked.connection:
            raise errors.FailedPreconditionError(
                f"{self._server} is being saved already: one worker at a time saves"
            )
        self._cut = Cut(asked.connection, asked.path)
        reply = pb.HoldReply()
        for connection in self._store.connections.values():
            reply.last.add(
                worker=connection.worker, strategy=connection.strategy, sent=connection.sent
            )
        return Reply(reply.SerializeToString())

    def cut(self, path: str, targets: Mapping[Key, int], then: Callable[[], None]) -> None:
        """Apply only the held pushes that belong to a checkpoint, then call a function.

        Args:
            path: File of the save.
            targets: The last push of each connection, by worker and name of its strategy.
            then: The function. All pushes go on after it.

        Raises:
            FailedPreconditionError: Pushes are not held for this save.
        """
        if self._cut is None or self._cut.path != path:
            raise errors.FailedPreconditionError(
                f"{self._server} does not hold pushes for the save of {path!r}"
            )
        self._cut.aim(targets, then)
        self._continue()

    def release(self, path: str) -> None:
        """Release all pushes if they are held for the save of this file."""
        if self._cut is not None and self._cut.path == path:
            self._cut = None
            self._continue()

    def wait(self, request: Request) -> Reply:
        """Reply when all steps before a step have ended."""
        asked = pb.AwaitRequest.FromString(request.body)
        steps = self._steps_of(asked)
        if steps.over >= asked.step:
            return Reply()
        steps.waiting.append((asked.step, request))
        return LATER

    def fail(self, request: Request) -> None:
        """Fail a step for all members, because one member cannot push its gradients."""
        asked = pb.AwaitRequest.FromString(request.body)
        steps = self._steps_of(asked)
        if steps.over > asked.step:
            return
        worker = self._store.connections[asked.connection].worker
        problem = (
            f"step {asked.step} has failed: worker {worker}, whose gradients belong to the step, "
            "could not push them"
        )
        steps.failed[asked.step] = problem
        given = steps.given.pop(asked.step, {})
        self._end(list(given.values()), errors.AbortedError(problem))
        self._end_step(steps, asked.step)
        self._continue()  # with later pushes of the same connections

    def _steps_of(self, asked: pb.AwaitRequest) -> _Steps:
        training = self._store.connections[asked.connection].training
        return self._steps.setdefault(training, _Steps())

    def _continue(self) -> None:
        """Apply the pushes that are no longer held. End the cut if it is reached."""
        self._continue_again = True
        if self._continuing:  # nested calls would exceed the recursion limit
            return
        self._continuing = True
        try:
            while self._continue_again:
                self._continue_again = False
                for connection in list(self._store.connections.values()):
                    self._begin_next(connection)
                cut = self._cut
                applied = {one.key: one.ended for one in self._store.connections.values()}
                if cut is not None and cut.is_reached(applied):
                    self._cut = None
                    cut.then()
                    self._continue_again = True
        finally:
            self._continuing = False

    def _begin_next(self, connection: ServedConnection) -> None:
        """Begin the pushes of a connection in order, up to the first push that must wait."""
        while connection.unfinished:
            push: ReceivedPush = connection.unfinished[0]
            held = self._cut is not None and not self._cut.allows(
                connection.key, push.message.sequence
            )
            if push.begun or held:
                return
            push.begun = True
            self._begin(push)

    def _begin(self, push: ReceivedPush) -> None:
        message = push.message
        if not message.members:
            self._apply([push])
            if self._cut is not None:
                self._continue()  # the save may have waited for this push
            return
        steps = self._steps.setdefault(push.connection.training, _Steps())
        if message.step in steps.failed:
            self._end([push], errors.AbortedError(steps.failed[message.step]))
            if self._cut is not None:
                self._continue()
            return
        given = steps.given.setdefault(message.step, {})
        given[push.connection.worker] = push
        if set(message.members) <= set(given):
            del steps.given[message.step]
            self._apply([given[worker] for worker in message.members])
            self._end_step(steps, message.step)
            self._continue()

    def _end_step(self, steps: _Steps, step: int) -> None:
        """Count a step as over, and reply to the workers that wait for it."""
        steps.over = max(steps.over, step + 1)
        ready = [request for number, request in steps.waiting if number <= steps.over]
        steps.waiting = [pair for pair in steps.waiting if pair[0] > steps.over]
        for request in ready:
            request.reply()

    def _apply(self, batch: Sequence[ReceivedPush]) -> None:
        """Apply the pushes of several workers as one change, and reply to them."""
        begin = time.time()
        result: Sequence[Outcome] | BaseException
        try:
            result = self._applier.apply(batch)
        except (Exception, SystemExit) as error:
            result = error
        self._metrics.note("apply", begin, "busy_s")
        self._end(batch, result)

    def _end(
        self, batch: Sequence[ReceivedPush], result: Sequence[Outcome] | BaseException
    ) -> None:
        """Reply to pushes that were applied or have failed."""
        for number, push in enumerate(batch):
            if isinstance(result, BaseException):
                push.request.fail(result)
            else:
                outcome = result[number]
                push.request.reply(pack_reply(outcome.versions, outcome.staleness))
            connection = push.connection
            connection.unfinished.popleft()
            connection.ended = push.message.sequence
            connection.sent = tuple(push.message.sent)
            self._metrics.values["steps"] += 1
            self._metrics.values["queued"] -= 1
            self._forget_if_closed(push.message.connection)
        if isinstance(result, BaseException):
            result.__traceback__ = None  # its frames keep the arrays of the pushes

    def _forget_if_closed(self, number: int) -> None:
        connection = self._store.connections[number]
        if not connection.is_closed or connection.unfinished:
            return
        self._store.detach(number)
        self._rules.forget(number)
        self._targets.clear()
        self._forget(number, connection.strategy)
