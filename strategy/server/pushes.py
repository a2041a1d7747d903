"""Ordering of pushes: by connection, and by synchronous step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mpidist import LATER, Reply, Request, TaskMetrics, errors
from strategy.checkpoints.cut import Cut, Key
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.applying import Applier, Outcome, ReceivedPush, read_changes
from strategy.server.catalogue import Catalogue
from strategy.server.rules import Rules
from strategy.server.served import ServedConnection, Training
from strategy.shared.push_message import PushMessage, pack_reply


@dataclass
class _Steps:
    """The synchronous steps of strategies that train together.

    Attributes:
        over: Number of steps that were applied or have failed.
        given: Pushes that wait for the other members of their step, by worker.
        failed: The reason of each failed step, by step.
        waiting: Waiting requests, each with the number of steps that must be over.
    """

    over: int = 0
    given: dict[int, ReceivedPush] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    waiting: list[tuple[int, Request]] = field(default_factory=list)


class Pushes:
    """Queue of the pushes to a server.

    Pushes of asynchronous workers are applied one by one. Pushes of synchronous workers are applied
    step by step. A push is applied as soon as all of its messages have arrived, unless

    - the pushes of other members of its step are missing,
    - an earlier push of its connection waits, or
    - a checkpoint holds it.

    Handlers apply whole pushes, so no variable is half changed between two requests.

    Args:
        server: Name of the server, for messages.
        catalogue: The variables and connections of the server.
        rules: The update rules.
        metrics: The metrics of the server.
        forget: Called with the number of a connection that was closed, and its strategy.
    """

    def __init__(
        self,
        server: str,
        catalogue: Catalogue,
        rules: Rules,
        metrics: TaskMetrics,
        forget: Callable[[int, str], None],
    ) -> None:
        self._server = server
        self._catalogue = catalogue
        self._applier = Applier(server, catalogue, rules, metrics)
        self._metrics = metrics
        self._steps: dict[Training, _Steps] = {}
        self._cut: Cut | None = None
        self._forget = forget
        self._continuing = self._continue_again = False

    def take_slice(self, request: Request) -> None:
        """Keep a slice of a large push until the push arrives."""
        asked = pb.SliceRequest.FromString(request.body)
        connection = self._catalogue.connections[asked.connection]
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
        connection = self._catalogue.connections[number]
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
        connection = self._catalogue.connections[message.connection]
        arrays = self.collected(message.connection, message.slices, request.buffers)
        if message.sequence <= connection.sequence:
            raise errors.InternalError(
                f"{self._server} got push {message.sequence} of worker {connection.worker} after "
                f"push {connection.sequence}"
            )
        connection.sequence = message.sequence
        push = ReceivedPush(message, connection, request)
        try:
            push.changes = read_changes(message.entries, arrays, self._catalogue.variables)
        except errors.InvalidArgumentError as error:
            push.problem = error  # raised in its turn, since the other members of the step wait
        self._metrics.values["in_bytes"] += sum([buffer.nbytes for buffer in request.buffers])
        connection.unfinished.append(push)
        self._metrics.values["queued"] += 1
        self._begin_next(connection)
        return LATER

    def detach(self, request: Request) -> None:
        """Forget the connection of a strategy that a worker has closed, after its last push."""
        number = pb.AttachReply.FromString(request.body).connection
        self._catalogue.connections[number].is_closed = True
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
        for connection in self._catalogue.connections.values():
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

    def release(self, request: Request) -> None:
        """Release all pushes if they are held for the save that the request names."""
        asked = pb.HoldRequest.FromString(request.body)
        if self._cut is not None and self._cut.path == asked.path:
            self._cut = None
            self._continue()

    def wait(self, request: Request) -> Reply:
        """Reply when all steps before a step are over."""
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
        worker = self._catalogue.connections[asked.connection].worker
        problem = (
            f"step {asked.step} has failed: worker {worker}, whose gradients belong to the step, "
            "could not push them"
        )
        steps.failed[asked.step] = problem
        given = [one for one in steps.given.values() if one.message.step == asked.step]
        for push in given:
            del steps.given[push.connection.worker]
        self._end(given, errors.AbortedError(problem))
        self._end_step(steps, asked.step)
        self._continue()  # with later pushes of the same connections

    # Inside

    def _steps_of(self, asked: pb.AwaitRequest) -> _Steps:
        training = self._catalogue.connections[asked.connection].training
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
                for connection in list(self._catalogue.connections.values()):
                    self._begin_next(connection)
                cut = self._cut
                applied = {one.key: one.applied for one in self._catalogue.connections.values()}
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
        steps.given[push.connection.worker] = push
        if set(message.members) <= set(steps.given):
            self._apply([steps.given.pop(worker) for worker in message.members])
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
            connection.applied = push.message.sequence
            connection.sent = tuple(push.message.sent)
            self._metrics.values["steps"] += 1
            self._metrics.values["queued"] -= 1
            self._forget_if_closed(push.message.connection)
        if isinstance(result, BaseException):
            result.__traceback__ = None  # its frames keep the arrays of the pushes

    def _forget_if_closed(self, number: int) -> None:
        connection = self._catalogue.connections[number]
        if not connection.is_closed or connection.unfinished:
            return
        self._catalogue.detach(number)
        self._forget(number, connection.strategy)
