"""Synchronization modes: when a step of a worker waits for other workers."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from mpidist import Reply, Work, errors
from mpidist.config import config as settings
from mpidist.errors import did_you_mean
from mpidist.mpi import waiting_for
from strategy.client.changes import Change
from strategy.client.connection import Connection, push_all
from strategy.client.waits import LOOK_S, block
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol.checks import whole_number
from strategy.protocol.rounds import Decision

logger = logging.getLogger(__name__)

ModeName = Literal["async", "sync", "ssp"]
MODES = get_args(ModeName)


class SyncMode(ABC):
    """Base class of the synchronization modes.

    Args:
        connections: The connections to all ps tasks. The first ps task decides about steps.
        worker: Index of this worker.
    """

    def __init__(self, connections: Sequence[Connection], worker: int) -> None:
        self._connections = connections
        self._first = connections[0]
        self._worker = worker
        self._steps = self._first.first_step
        self._left = False
        # Threads of a worker make steps one after the other.
        self._turn = threading.Lock()

    @abstractmethod
    def push(self, changes: Sequence[Change], describe: Callable[[], str]) -> Work:
        """Make a step: push gradients when the mode allows it.

        Args:
            changes: The gradients.
            describe: Returns the variables and the optimizer as text that is equal on all workers.

        Returns:
            A Work whose result is a :data:`PushResult`, or None if the gradients came too late for
            their step.
        """

    @abstractmethod
    def pass_over(self) -> Work:
        """Make a step without changes, so that other workers do not wait for this worker."""

    def leave(self) -> None:
        """Make no more steps, so that other workers do not wait for this worker any more."""
        with self._turn:
            if not self._left:
                self._left = True
                self._first.call("Leave", pb.AttachReply(connection=self._first.number))

    def _check_here(self) -> None:
        if self._left:
            raise errors.FailedPreconditionError(
                f"worker {self._worker} has finished its training, and others do not wait for it "
                "any more: it cannot push gradients"
            )

    def _wait(self, work: Work) -> Any:
        """Return the result of a call that waits for other workers. Report a long wait once."""
        if work.is_completed():
            return work.result()
        with self._first.metrics.timed("wait for workers", "waited_s"):
            self._wait_for_others(work)
        return work.result()

    def _wait_for_others(self, work: Work) -> None:
        since, began = time.monotonic(), time.time()
        period = min(LOOK_S, settings.stall_s)
        said = False
        work.block(since + period)  # most waits end here
        names = [] if work.is_completed() else self._missing()
        while not work.is_completed():
            if not said and names and time.monotonic() >= since + settings.stall_s:
                said = True
                logger.warning(
                    "worker %d has waited %.3g s at its step %d for worker %s, which makes no "
                    "step in strategy %r; if it never will, it should call the strategy's finish()",
                    self._worker,
                    time.monotonic() - since,
                    self._steps,
                    ", ".join(map(str, names)),
                    self._first.strategy,
                )
            with waiting_for(self._awaited(), self._first.worker_tasks(names), began):
                work.block(time.monotonic() + period)
                if not work.is_completed():
                    names = self._missing()

    def _awaited(self) -> str:
        """Describe the wait for other workers."""
        return f"step {self._steps} of strategy {self._first.strategy!r}"

    def _missing(self) -> list[int]:
        """Return the workers for which others wait. Ends the waits for workers that have left."""
        reply = self._first.call("Missing", pb.AttachReply(connection=self._first.number))
        return list(pb.MissingReply.FromString(reply.body).workers)


class Asynchronous(SyncMode):
    """The mode ``"async"``: workers do not wait for each other."""

    def push(self, changes: Sequence[Change], describe: Callable[[], str]) -> Work:
        """See :meth:`SyncMode.push`."""
        return push_all(changes)

    def pass_over(self) -> Work:
        """Return a completed Work."""
        return _nothing()

    def leave(self) -> None:
        """Do nothing: no worker waits for another."""


class Synchronous(SyncMode):
    """The mode ``"sync"``: a step averages the gradients of all workers, or of the first N."""

    # The pending Enter call, if this worker was interrupted while it waited.
    _entering: Work | None = None

    def push(self, changes: Sequence[Change], describe: Callable[[], str]) -> Work:
        """See :meth:`SyncMode.push`."""
        with self._turn:
            self._check_here()
            for connection in self._connections:
                connection.make_room()  # raises earlier errors before others wait for this push
            decision = self._enter(describe())
            if not decision.members:
                return self._follow(decision)
            try:
                work = push_all(changes, self._connections, decision)
            except BaseException:
                self._fail(decision)
                raise
            self._steps = decision.step + 1
            return work

    def pass_over(self) -> Work:
        """See :meth:`SyncMode.pass_over`."""
        with self._turn:
            self._check_here()
            decision = self._enter(None)
            if decision.members:  # an interrupted step had announced gradients
                self._fail(decision)
                decision = replace(decision, step=decision.step + 1)
            return self._follow(decision)

    def leave(self) -> None:
        """Make no more steps, so that other workers do not wait for this worker any more."""
        super().leave()
        with self._turn:
            entering, self._entering = self._entering, None
            if entering is None:
                return
            # The server has replied if it has counted this worker in a step. Else it discards the
            # request, and the call fails.
            entering.block(time.monotonic() + settings.call_timeout_s)
            if entering.is_success() and entering.result().members:
                self._fail(entering.result())

    def _enter(self, description: str | None) -> Decision:
        if self._entering is None:
            self._entering = self._start_entering(description)
        decision: Decision = self._wait(self._entering)
        self._entering = None
        if decision.problem:
            raise errors.InvalidArgumentError(decision.problem)
        return decision

    def _start_entering(self, description: str | None) -> Work:
        """Ask the first server to count this worker in its next step.

        Args:
            description: The variables and the optimizer of the changes; None without changes.

        Returns:
            A Work with a :class:`Decision` as its result.
        """
        asked = pb.EnterRequest(connection=self._first.number, step=self._steps)
        if description is not None:
            asked.gives, asked.description = True, description

        def decision(reply: Reply) -> Decision:
            answer = pb.EnterReply.FromString(reply.body)
            return Decision(answer.step, tuple(answer.members), answer.problem)

        return self._first.start("Enter", asked).then(decision)

    def _follow(self, decision: Decision) -> Work:
        """Continue with a later step, after all steps before it have ended."""
        self._call_all("Await", decision.step)
        self._steps = decision.step
        return _nothing()

    def _fail(self, decision: Decision) -> None:
        """Tell the servers that this worker will not push its part of a step."""
        self._steps = decision.step + 1
        self._call_all("Fail", decision.step)

    def _call_all(self, method: str, step: int) -> None:
        """Call a method about a step on all servers, and wait for the replies."""
        works = [
            connection.start(method, pb.AwaitRequest(connection=connection.number, step=step))
            for connection in self._connections
        ]
        tasks = [connection.task for connection in self._connections]
        awaited = f"the steps before step {step} of strategy {self._first.strategy!r}"
        block(works, lambda: (awaited, tasks))
        for work in works:
            work.wait()


class StaleSynchronous(SyncMode):
    """The mode ``"ssp"``: a worker is at most ``staleness`` steps ahead of the slowest."""

    def push(self, changes: Sequence[Change], describe: Callable[[], str]) -> Work:
        """See :meth:`SyncMode.push`."""
        with self._turn:
            self._check_here()
            work = push_all(changes)
            # The clock counts pushes that were applied or have failed.
            block([work], lambda: self._describe_push(changes))
            self._tick()
            return work

    def pass_over(self) -> Work:
        """See :meth:`SyncMode.pass_over`."""
        with self._turn:
            self._check_here()
            self._tick()
            return _nothing()

    def _describe_push(self, changes: Sequence[Change]) -> tuple[str, list[str]]:
        tasks = list(dict.fromkeys(change.connection.task for change in changes))
        push = f"the push of step {self._steps} of strategy {self._first.strategy!r}"
        return f"{', '.join(tasks)} to apply {push}", tasks

    def _awaited(self) -> str:
        return f"the slowest workers of strategy {self._first.strategy!r}, to begin its next step"

    def _tick(self) -> None:
        self._steps += 1
        asked = pb.ClockRequest(connection=self._first.number, clock=self._steps)
        self._wait(self._first.start("Clock", asked))


def _nothing() -> Work:
    work = Work("push")
    work.complete()
    return work


_MODES: dict[str, type[SyncMode]] = {
    "async": Asynchronous,
    "sync": Synchronous,
    "ssp": StaleSynchronous,
}


def checked_mode(
    name: str,
    workers: int | None,
    backup_workers: int,
    staleness: int | None,
    compression: str,
) -> pb.Mode:
    """Check a mode and return it as a message to the servers.

    Args:
        name: One of :data:`MODES`.
        workers: Number of workers; None in local mode, which has no backup workers.
        backup_workers: Number of backup workers, less than ``workers``; for ``"sync"`` only.
        staleness: Steps that a worker may be ahead of the slowest; for ``"ssp"`` only, which
            requires it.
        compression: Description of the gradient compression.

    Raises:
        TypeError: A number is not an integer.
        ValueError: The name is unknown, or a number does not fit the mode.
    """
    if name not in MODES:
        hint = did_you_mean(name, MODES)
        raise ValueError(f"unknown mode {name!r}{hint}; the known ones are {MODES}")
    backup_workers = whole_number(backup_workers=backup_workers)
    if backup_workers and name != "sync":
        raise ValueError(f"backup_workers are for mode 'sync', not {name!r}")
    if backup_workers < 0 or (workers is not None and backup_workers >= workers):
        most = "" if workers is None else f" to {workers - 1}, one less than there are workers"
        raise ValueError(f"backup_workers must be from 0{most}, not {backup_workers}")
    if name == "ssp" and staleness is None:
        raise ValueError("mode 'ssp' needs staleness: how many steps ahead a worker may be")
    if name != "ssp" and staleness is not None:
        raise ValueError(f"staleness is for mode 'ssp', not {name!r}")
    if staleness is not None and not 0 <= whole_number(staleness=staleness) < 1 << 31:
        raise ValueError(f"staleness must be a number of steps from 0 to 2^31, not {staleness}")
    return pb.Mode(
        name=name,
        compression=compression,
        backup_workers=0 if workers is None else backup_workers,
        staleness=staleness or 0,
    )


def sync_mode_of(mode: pb.Mode, connections: Sequence[Connection], worker: int) -> SyncMode:
    """Return the synchronization of a worker in a mode."""
    return _MODES[mode.name](connections, worker)
