"""How a server takes what workers push, and changes its variables by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mpidist import LATER, Reply, Request, TaskMetrics, errors
from strategy.checkpoints.cut import Cut, Key
from strategy.proto import parameter_server_pb2 as pb
from strategy.server.applying import Applier
from strategy.server.catalogue import Catalogue
from strategy.server.given import Given
from strategy.server.known_rules import Rules
from strategy.server.ledger import Ledger
from strategy.server.reminder import Reminder
from strategy.server.served import ServedConnection
from strategy.shared.inline import Disclosed

_RESUME_S = 2e-3


@dataclass
class _Steps:
    """The synchronous steps of the workers' strategies of one number.

    Attributes:
        begun: How many are being applied, or are over.
        over: How many have been applied, or have failed.
        given: What has been pushed for the next ones, by worker.
        failed: Steps that fail, and why.
        waiting: Who waits for how many to be over.
    """

    begun: int = 0
    over: int = 0
    given: dict[int, Given] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    waiting: list[tuple[int, Request]] = field(default_factory=list)


class Pushes:
    """Takes pushes: those of asynchronous workers one by one, those of a synchronous step together.

    Where a worker is late with what it streams, its push stays half-way, and holds up nobody but
    those who want the same variable.

    Args:
        who: The server, for messages.
        catalogue: Its variables and connections.
        rules: Its rules.
        metrics: What the server has done so far.
        remind: Has :meth:`resume` called on the thread that serves.
        forget_connection: Called with the number of a connection that was closed.
    """

    def __init__(
        self,
        who: str,
        catalogue: Catalogue,
        rules: Rules,
        metrics: TaskMetrics,
        remind: Callable[[], None],
        forget_connection: Callable[[int], None],
    ) -> None:
        self._who = who
        self._catalogue = catalogue
        self._ledger = Ledger(catalogue, rules, metrics)
        self._applier = Applier(who, self._ledger)
        self._metrics = metrics
        self._steps: dict[int, _Steps] = {}  # by the number of the strategy
        self._cut: Cut | None = None
        self._half_way: list[Iterator[None]] = []
        self._later: list[tuple[float, Callable[[], None]]] = []  # since when, and what
        self._put_off: list[tuple[int, Callable[[], None]]] = []
        self._reminder = Reminder(remind, _RESUME_S)
        self._forget_connection = forget_connection

    def close(self) -> None:
        """Local. Resume nothing any more."""
        self._reminder.close()

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
        if any(entry.staged for entry in push.entries):
            connection.opened_ring()  # refused before it takes its number and holds variables
        connection.sequence = expected
        given = Given(push, connection, [request], Disclosed(iter(request.buffers)))
        self._metrics.values["in_bytes"] += sum([buffer.nbytes for buffer in request.buffers])
        # One after the other: what a connection streams lies in its ring in this order.
        connection.unfinished.append(given)
        self._metrics.values["queued"] += 1
        self._go_on(connection)
        return LATER

    def detach(self, request: Request) -> None:
        """Forget the connection of a strategy that a worker has closed, after its last push."""
        number = pb.AttachReply.FromString(request.body).connection
        self._catalogue.connections[number].is_closed = True
        self._forget_if_closed(number)
        self._after()  # a save may have waited for pushes of this connection

    def _forget_if_closed(self, number: int) -> None:
        connection = self._catalogue.connections[number]
        if not connection.is_closed or connection.unfinished:
            return
        self._catalogue.detach(number)
        self._forget_connection(number)

    def hold(self, request: Request) -> Reply:
        """Take up no more pushes until a save says which ones it wants."""
        asked = pb.HoldRequest.FromString(request.body)
        # A worker saves one checkpoint at a time. If its connection holds pushes for another save,
        # that save was interrupted, and its release was not sent.
        if self._cut is not None and self._cut.owner != asked.connection:
            raise errors.FailedPreconditionError(
                f"{self._who} is being saved already: one worker at a time saves"
            )
        self._cut = Cut(asked.connection, asked.path)
        self.when_free(None, lambda: request.reply(self._last_pushes()))
        return LATER

    def when_free(self, variable: int | None, action: Callable[[], None]) -> None:
        """Local. Do something once no push is in the middle of a variable, at once if none is.

        Args:
            variable: Its number; None: once no push is half-way at all.
            action: What; it must not raise.
        """
        if variable is None and self._half_way:
            self._later.append((time.monotonic(), action))  # no push begins until then
        elif variable is not None and self.is_busy(variable):
            self.attend(self._once_free(variable, action))
        else:
            action()

    def is_busy(self, variable: int) -> bool:
        """Local. Whether a push is in the middle of a variable, or it is held."""
        return variable in self._ledger.in_work

    def awaited_since(self, variable: int) -> float:
        """Local. Return when the first push, save or restore arrived that waits for a variable.

        Args:
            variable: Its number.

        Returns:
            Seconds, by ``time.monotonic()``; infinity if none waits.
        """
        return min([self._ledger.awaited_since(variable), *(since for since, _ in self._later)])

    def attend(self, work: Iterator[None]) -> None:
        """Local. Do some work as far as it can be done, and go on with it as with pushes.

        It is in one line with the pushes that want the same variable: who waits has it before those
        that come.

        Args:
            work: Gives None where it has to wait for a variable; it must not raise.
        """
        if _goes_on(work):
            self._half_way.append(work)
            self._reminder.start()

    def _once_free(self, variable: int, action: Callable[[], None]) -> Iterator[None]:
        while self.is_busy(variable):
            yield
        action()

    def hold_variable(self, variable: int, work: Iterator[None]) -> None:
        """Local. Once a variable is free, keep it as it is until some work has ended.

        Where something waits until nothing is half-way, it goes first: else those who read on and
        on would put it off for ever, and all pushes with it.

        Args:
            variable: Its number.
            work: What is gone on with as with pushes that are half-way; it must not raise.
        """

        def begin() -> None:
            self._ledger.in_work.add(variable)
            self.attend(self._holding(variable, work))

        if self._later:
            self._put_off.append((variable, begin))
        else:
            self.when_free(variable, begin)

    def _holding(self, variable: int, work: Iterator[None]) -> Iterator[None]:
        try:
            yield from work
        finally:
            self._ledger.in_work.discard(variable)

    def give_up(self, request: Request) -> None:
        """Local. A worker says that it streams no more, though a push of it is not whole."""
        connection = pb.AttachReply.FromString(request.body).connection
        ring = self._catalogue.connections[connection].ring
        if ring is not None:
            ring.broken = "was interrupted in it"
        self.resume(request)

    def resume(self, _request: Request) -> None:
        """Local. Go on with pushes that are half-way, as far as their workers have come."""
        for work in list(self._half_way):
            if not _goes_on(work):
                self._half_way.remove(work)
        if not self._half_way:
            self._reminder.stop()
        self._reminder.done()
        self._after()

    def cut(self, path: str, targets: Mapping[Key, int], then: Callable[[], None]) -> None:
        """Apply the pushes that belong to a checkpoint, and no others. Then call a function.

        Args:
            path: File of the save.
            targets: The last push of each connection, by worker and number of its strategy.
            then: The function. All pushes go on after it.

        Raises:
            FailedPreconditionError: Pushes are not held for this save.
        """
        if self._cut is None or self._cut.path != path:
            raise errors.FailedPreconditionError(
                f"{self._who} does not hold pushes for the save of {path!r}"
            )
        self._cut.aim(targets, then)
        self._after()

    def release(self, request: Request) -> None:
        """Go on with all pushes if they are held for the save that the request names."""
        asked = pb.HoldRequest.FromString(request.body)
        if self._cut is not None and self._cut.path == asked.path:
            self._cut = None
            self._after()

    def _after(self) -> None:
        """Go on with what may, after a push has been applied or what is held has changed."""
        while self._later and not self._half_way:
            self._later.pop(0)[1]()
        if not self._later:
            put_off, self._put_off = self._put_off, []
            for variable, begin in put_off:
                self.when_free(variable, begin)
        for connection in list(self._catalogue.connections.values()):
            self._go_on(connection)
        cut = self._cut
        applied = {one.key: one.applied for one in self._catalogue.connections.values()}
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
            if given.begun or held or self._later:
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
        if steps.begun > asked.step:
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

    def _begin(self, given: Given) -> None:
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
            steps.begun = max(steps.begun, push.step + 1)
            self._finish(batch, then=lambda: self._close(steps, push.step))

    def _close(self, steps: _Steps, step: int) -> None:
        """Answer those who wait for a step to be over."""
        steps.begun = max(steps.begun, step + 1)
        steps.over = max(steps.over, step + 1)
        steps.failed = {number: why for number, why in steps.failed.items() if number >= step}
        ready = [request for number, request in steps.waiting if number <= steps.over]
        steps.waiting = [pair for pair in steps.waiting if pair[0] > steps.over]
        for request in ready:
            request.reply()

    def _finish(
        self, batch: Sequence[Given], problem: str = "", then: Callable[[], None] = lambda: None
    ) -> None:
        """Apply what several workers have pushed as one change, or drop it, and answer them."""
        if not batch:
            return
        self.attend(self._finishing(batch, problem, then))

    def _finishing(
        self, batch: Sequence[Given], problem: str, then: Callable[[], None]
    ) -> Iterator[None]:
        replies = [pb.PushReply() for _ in batch]
        try:
            with self._metrics.timed("apply"):
                yield from self._busy(self._applier.apply(batch, replies, problem))
        except (Exception, SystemExit) as error:
            for given in batch:
                given.answer(error)
        else:
            for given, reply in zip(batch, replies, strict=True):
                given.answer(reply.SerializeToString())
        for given in batch:
            connection = given.connection
            connection.unfinished.popleft()
            self._metrics.values["steps"] += 1
            self._metrics.values["queued"] -= 1
            connection.applied, connection.sent = given.push.sequence, tuple(given.push.sent)
            self._forget_if_closed(given.push.connection)
        then()
        if len(batch) > 1 or self._cut is not None:
            self._after()

    def _busy(self, work: Iterator[None]) -> Iterator[None]:
        """Count the time that some work takes, and not the time for which it stands half-way."""
        while True:
            begin = time.monotonic()
            try:
                if next(work, work) is not None:
                    return
            finally:
                self._metrics.values["busy_s"] += time.monotonic() - begin
            yield

    def _last_pushes(self) -> bytes:
        reply = pb.HoldReply()
        for connection in self._catalogue.connections.values():
            reply.last.add(
                worker=connection.worker, strategy=connection.strategy, sent=connection.sent
            )
        return reply.SerializeToString()


def _goes_on(work: Iterator[None]) -> bool:
    """Whether a push is still half-way after as much of it as there is has been applied."""
    for _ in work:
        return True
    return False
