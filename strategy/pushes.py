"""How a server takes what workers push, and changes its variables by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpidist import LATER, Reply, Request, TaskMetrics, errors
from strategy.blocks import in_blocks, scattered, widened
from strategy.catalogue import Catalogue
from strategy.cut import Cut
from strategy.known_rules import Rules
from strategy.means import mean_of_blocks, mean_of_rows
from strategy.owned_shard import OwnedShard, Scratch
from strategy.proto import parameter_server_pb2 as pb
from strategy.served import Key, ServedConnection, ServedVariable

Array = NDArray[Any]


@dataclass
class _Given:
    """What one worker pushes.

    Attributes:
        push: The message.
        connection: Its way.
        requests: To be answered: the first, and those that repeat it.
        inline: The arrays in the message, as far as they have not been used.
        begun: Whether it has been taken up; otherwise it waits for those before it, or for a save.
    """

    push: pb.PushRequest
    connection: ServedConnection
    requests: list[Request]
    inline: Iterator[Array]
    begun: bool = False

    def dense(self, entry: pb.PushEntry, shard: OwnedShard) -> Iterator[Array]:
        """The change of a whole shard, block by block, in its dtype."""
        layout = shard.layout
        wire = np.dtype(entry.wire or layout.dtype)
        if entry.places:
            places = np.array(next(self.inline)).view(np.int64)
            return scattered(places, np.array(next(self.inline)).view(layout.dtype), layout.size)
        if entry.staged:
            assert self.connection.ring is not None
            blocks = self.connection.ring.read(layout.size, wire)
        else:
            blocks = in_blocks(np.array(next(self.inline)).view(wire))
        return blocks if wire == layout.dtype else widened(blocks, layout.dtype)

    def rows(self, entry: pb.PushEntry, shard: OwnedShard) -> tuple[Array, Array]:
        """Numbers of rows, and what is for them, flat."""
        dtype = shard.layout.dtype
        ids = np.array(next(self.inline)).view(np.int64)
        rows = np.array(next(self.inline)).view(np.dtype(entry.wire or dtype))
        return ids, rows.astype(dtype, copy=False)


@dataclass
class _Steps:
    """The synchronous steps of the workers' strategies of one number.

    Attributes:
        over: How many have been applied, or have failed.
        given: What has been pushed for the next ones, by worker.
        failed: Steps that fail, and why.
        waiting: Who waits for how many to be over.
    """

    over: int = 0
    given: dict[int, _Given] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    waiting: list[tuple[int, Request]] = field(default_factory=list)


class Pushes:
    """Takes pushes: those of asynchronous workers one by one, those of a synchronous step together.

    Args:
        who: The server, for messages.
        catalogue: Its variables and connections.
        rules: Its rules.
        metrics: What the server has done so far.
    """

    def __init__(self, who: str, catalogue: Catalogue, rules: Rules, metrics: TaskMetrics) -> None:
        self._who = who
        self._catalogue = catalogue
        self._rules = rules
        self._metrics = metrics
        self._scratch = Scratch()
        self._steps: dict[int, _Steps] = {}  # by the number of the strategy
        self._cut: Cut | None = None

    def push(self, request: Request) -> Reply:
        """Local. A worker pushes; it is answered when its changes have been applied."""
        push = pb.PushRequest.FromString(request.body)
        connection = self._catalogue.connections[push.connection]
        if push.sequence <= connection.sequence:
            return self._again(push, connection, request)
        expected = connection.sequence + 1
        if push.sequence != expected:
            raise errors.InternalError(
                f"{self._who} got push {push.sequence} of connection {push.connection}, of worker "
                f"{connection.worker}, and expected {expected}"
            )
        connection.sequence = expected
        given = _Given(push, connection, [request], iter(request.buffers))
        self._metrics.values["in_bytes"] += sum([buffer.nbytes for buffer in request.buffers])
        # One after the other: what a connection streams lies in its ring in this order.
        connection.unfinished.append(given)
        self._metrics.values["queued"] += 1
        self._go_on(connection)
        return LATER

    def hold(self, request: Request) -> Reply:
        """Local. Take up no more pushes, until a save says up to which ones it wants them."""
        owner = pb.AttachReply.FromString(request.body).connection
        if self._cut is not None and self._cut.owner != owner:
            raise errors.FailedPreconditionError(
                f"{self._who} is being saved already: one worker at a time saves"
            )
        self._cut = Cut(owner)
        reply = pb.HoldReply()
        for connection in self._catalogue.connections:
            reply.last.add(
                worker=connection.worker, strategy=connection.strategy, sent=connection.sent
            )
        return Reply(reply.SerializeToString())

    def cut(self, targets: Mapping[Key, int], then: Callable[[], None]) -> None:
        """Local. Go on until some pushes have been applied, and no others; then do something.

        Args:
            targets: The last push of each connection, by worker and number of its strategy.
            then: What; then all go on.
        """
        if self._cut is None:
            raise errors.FailedPreconditionError(f"{self._who} has not been asked to hold pushes")
        self._cut.aim(targets, then)
        self._after()

    def release(self, request: Request) -> None:
        """Local. Go on with all pushes, if they are held for this connection."""
        owner = pb.AttachReply.FromString(request.body).connection
        if self._cut is not None and self._cut.owner == owner:
            self._cut = None
            self._after()

    def _after(self) -> None:
        """Go on with what may, after a push has been applied or what is held has changed."""
        for connection in self._catalogue.connections:
            self._go_on(connection)
        cut = self._cut
        applied = {one.key: one.applied for one in self._catalogue.connections}
        if cut is not None and cut.is_reached(applied):
            self._cut = None
            cut.then()
            self._after()

    def _go_on(self, connection: ServedConnection) -> None:
        """Take up the oldest push of a connection, unless it is held, or has been taken up."""
        while connection.unfinished:
            given = connection.unfinished[0]
            held = self._cut is not None and not self._cut.allows(
                connection.key, given.push.sequence
            )
            if given.begun or held:
                return
            given.begun = True
            self._begin(given)

    def _again(self, push: pb.PushRequest, connection: ServedConnection, request: Request) -> Reply:
        """A push that has been taken already is not applied again, but gets the same answer."""
        for given in connection.unfinished:
            if given.push.sequence == push.sequence:
                given.requests.append(request)
                return LATER
        answer = connection.answers.get(push.sequence)
        if answer is None:
            raise errors.InternalError(
                f"{self._who} got push {push.sequence} of connection {push.connection}, of worker "
                f"{connection.worker}, again, long after {connection.sequence}"
            )
        if isinstance(answer, BaseException):
            raise answer
        return Reply(answer)

    def wait(self, request: Request) -> Reply:
        """Local. A worker whose gradients do not count waits for all steps before its next one."""
        asked = pb.AwaitRequest.FromString(request.body)
        steps = self._steps_of(asked)
        if steps.over >= asked.step:
            return Reply()
        steps.waiting.append((asked.step, request))
        return LATER

    def fail(self, request: Request) -> None:
        """Local. A worker cannot push what was to count in a step: it fails for all."""
        asked = pb.AwaitRequest.FromString(request.body)
        steps = self._steps_of(asked)
        if steps.over > asked.step:
            return
        worker = self._catalogue.connections[asked.connection].worker
        steps.failed[asked.step] = (
            f"step {asked.step} is not made: worker {worker}, whose gradients were to be a part of "
            "it, could not push them"
        )
        given = [one for one in steps.given.values() if one.push.step == asked.step]
        for one in given:
            del steps.given[one.connection.worker]
        self._finish(given, steps.failed[asked.step])
        self._close(steps, asked.step)
        self._after()  # what came behind those pushes waits no longer

    def _steps_of(self, asked: pb.AwaitRequest) -> _Steps:
        strategy = self._catalogue.connections[asked.connection].strategy
        return self._steps.setdefault(strategy, _Steps())

    def _begin(self, given: _Given) -> None:
        push = given.push
        if not push.members:
            self._finish([given])
            return
        steps = self._steps.setdefault(given.connection.strategy, _Steps())
        if push.step in steps.failed:
            self._finish([given], steps.failed[push.step])
            return
        steps.given[given.connection.worker] = given
        if set(push.members) <= set(steps.given):
            batch = [steps.given.pop(worker) for worker in push.members]
            steps.over = max(steps.over, push.step + 1)
            self._finish(batch)
            self._close(steps, push.step)

    def _close(self, steps: _Steps, step: int) -> None:
        """Answer those who wait for a step to be over."""
        steps.over = max(steps.over, step + 1)
        steps.failed = {number: why for number, why in steps.failed.items() if number >= step}
        ready = [request for number, request in steps.waiting if number <= steps.over]
        steps.waiting = [pair for pair in steps.waiting if pair[0] > steps.over]
        for request in ready:
            request.reply()

    def _finish(self, batch: Sequence[_Given], problem: str = "") -> None:
        """Apply what several workers have pushed as one change, or drop it, and answer them."""
        replies = [pb.PushReply() for _ in batch]
        try:
            with self._metrics.timed("apply", "busy_s"):
                self._apply(batch, replies, problem)
        except (Exception, SystemExit) as error:
            answers: list[bytes | BaseException] = [error] * len(batch)
        else:
            answers = [reply.SerializeToString() for reply in replies]
        for given, answer in zip(batch, answers, strict=True):
            given.connection.remember(given.push.sequence, answer)
            for request in given.requests:
                if isinstance(answer, BaseException):
                    request.fail(answer)
                else:
                    request.reply(answer)
        for given in batch:
            connection = given.connection
            connection.unfinished.popleft()
            self._metrics.values["steps"] += 1
            self._metrics.values["queued"] -= 1
            connection.applied, connection.sent = given.push.sequence, tuple(given.push.sent)
        if len(batch) > 1 or self._cut is not None:
            self._after()

    def _apply(
        self, batch: Sequence[_Given], replies: Sequence[pb.PushReply], refusal: str = ""
    ) -> None:
        if refusal:
            self._drop(batch)
            raise errors.AbortedError(refusal)
        self._check_alike(batch)
        problem: BaseException | None = None
        for entries in zip(*(given.push.entries for given in batch), strict=True):
            variable = self._catalogue.variables[entries[0].variable]
            shard = variable.shard
            rest: Sequence[Iterator[Array]] = ()
            # A bad entry must not leave its blocks in a ring, nor keep the others from applying.
            try:
                change, rest = self._change(batch, entries, shard)
                values = self._metrics.values
                staged = sum([entry.staged for entry in entries])
                values["in_bytes"] += staged * shard.layout.data_bytes
                for entry, reply in zip(entries, replies, strict=True):
                    reply.staleness.append(shard.version - min(entry.seen, shard.version))
                    if entry.rule >= pb.FIRST_OPTIMIZER:
                        values["changes"] += 1
                        values["staleness"] += reply.staleness[-1]
                change(*self._rules.find(entries[0].rule, shard))
                self._tell_waiting(variable)
            except errors.DeadlineExceededError:
                raise  # a worker's end of its ring is stuck or gone: nothing more will come
            except (Exception, SystemExit) as error:
                problem = problem or error
                for blocks in rest:
                    for _ in blocks:
                        continue
            for reply in replies:
                reply.versions.append(shard.version)
        if problem is not None:
            raise problem

    def _check_alike(self, batch: Sequence[_Given]) -> None:
        """InternalError unless all push the same: they were compared before they might."""
        kinds = [
            (given.push.step, [(entry.variable, entry.rows) for entry in given.push.entries])
            for given in batch
        ]
        if any(kind != kinds[0] for kind in kinds):
            self._drop(batch)
            raise errors.InternalError(f"{self._who} got pushes that make no step: {kinds}")

    def _drop(self, batch: Sequence[_Given]) -> None:
        """Take what workers stream out of their rings, and do nothing with it."""
        for given in batch:
            for entry in given.push.entries:
                if entry.staged:
                    for _ in given.dense(entry, self._catalogue.variables[entry.variable].shard):
                        continue

    def _change(
        self, batch: Sequence[_Given], entries: Sequence[pb.PushEntry], shard: OwnedShard
    ) -> tuple[Callable[..., None], Sequence[Iterator[Array]]]:
        """What changes a shard, given a rule, and the blocks that it takes one by one."""
        if entries[0].rows:
            parts = [given.rows(entry, shard) for given, entry in zip(batch, entries, strict=True)]
            ids, rows = mean_of_rows(parts, shard.layout)
            return partial(shard.apply_rows, ids=ids, rows=rows), ()
        each = [given.dense(entry, shard) for given, entry in zip(batch, entries, strict=True)]
        blocks = mean_of_blocks(each, shard.layout, self._scratch)
        return partial(shard.apply, blocks=blocks), each

    def _tell_waiting(self, variable: ServedVariable) -> None:
        """Answer those who wait for a variable's first value."""
        for request in variable.waiting:
            reply = self._catalogue.created(variable, request, must_initialize=False)
            request.reply(reply.body)
        variable.waiting.clear()
