"""How a worker's steps wait for those of other workers: not at all, for all, or within a bound."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mpidist import Work, errors, settings
from strategy.change import Change, push_all
from strategy.client import Connection
from strategy.proto import parameter_server_pb2 as pb
from strategy.rounds import Decision

logger = logging.getLogger(__name__)

MODES = ("async", "sync", "ssp")


class Pace(ABC):
    """What the modes have in common.

    Args:
        connections: One to each ps task; the first decides.
        worker: Index of this worker.
    """

    def __init__(self, connections: Sequence[Connection], worker: int) -> None:
        self._connections = connections
        self._worker = worker
        self._steps = 0
        self._left = False
        # The steps of a worker follow each other, whichever thread makes them.
        self._turn = threading.Lock()

    @abstractmethod
    def push(self, changes: Sequence[Change]) -> Work:
        """Local. Make a step: push gradients, when it is time.

        Returns:
            A Work whose result is the list of (version, staleness) after each change, or None if
            they come too late to count.
        """

    @abstractmethod
    def pass_over(self) -> Work:
        """Local. Make a step that changes nothing, so that others need not wait for it."""

    def leave(self) -> None:
        """Local. This worker makes no more steps."""
        with self._turn:
            if not self._left:
                self._left = True
                self._connections[0].leave()

    def _check_here(self) -> None:
        if self._left:
            raise errors.FailedPreconditionError(
                f"worker {self._worker} has finished its training, and others do not wait for it "
                "any more: it cannot push gradients"
            )

    def _wait(self, work: Work) -> Any:
        """The result of a work that ends when other workers have come as far; says so, once."""
        since = time.monotonic()
        work.block(since + settings.stall_s)
        if not work.is_completed():
            names = ", ".join(map(str, self._connections[0].missing()))
            logger.warning(
                "worker %d has waited %.3g s at its step %d for worker %s, which makes no step; if "
                "it never will, it should call the strategy's finish()",
                self._worker,
                time.monotonic() - since,
                self._steps,
                names,
            )
        return work.result()


class Asynchronous(Pace):
    """A worker waits for none."""

    def push(self, changes: Sequence[Change]) -> Work:
        """Local. See :meth:`Pace.push`."""
        return push_all(changes)

    def pass_over(self) -> Work:
        """Local. Nothing to do."""
        return _nothing()

    def leave(self) -> None:
        """Local. Nobody waits for it."""


class Synchronous(Pace):
    """Every step has the gradients of all workers, or of those that come first."""

    def push(self, changes: Sequence[Change]) -> Work:
        """Local. See :meth:`Pace.push`."""
        with self._turn:
            decision = self._enter(gives=True)
            if not decision.members:
                return self._follow(decision)
            self._steps += 1
            return push_all(changes, self._connections, decision)

    def pass_over(self) -> Work:
        """Local. See :meth:`Pace.pass_over`."""
        with self._turn:
            return self._follow(self._enter(gives=False))

    def _enter(self, *, gives: bool) -> Decision:
        self._check_here()
        decision: Decision = self._wait(self._connections[0].enter(self._steps, gives))
        return decision

    def _follow(self, decision: Decision) -> Work:
        """Go on with a later step, on values that have all the steps before."""
        for work in [c.wait_for_steps(decision.step) for c in self._connections]:
            work.wait()
        self._steps = decision.step
        return _nothing()


class StaleSynchronous(Pace):
    """A worker is never more than a number of steps ahead of the slowest."""

    def push(self, changes: Sequence[Change]) -> Work:
        """Local. See :meth:`Pace.push`."""
        with self._turn:
            self._check_here()
            work = push_all(changes)
            work.wait()  # what others may rely on has been applied
            self._tick()
            return work

    def pass_over(self) -> Work:
        """Local. See :meth:`Pace.pass_over`."""
        with self._turn:
            self._check_here()
            self._tick()
            return _nothing()

    def _tick(self) -> None:
        self._steps += 1
        self._wait(self._connections[0].tick(self._steps))


def _nothing() -> Work:
    work = Work("push")
    work.complete()
    return work


_PACES: dict[str, type[Pace]] = {
    "async": Asynchronous,
    "sync": Synchronous,
    "ssp": StaleSynchronous,
}


def checked_mode(name: str, workers: int, backup_workers: int, staleness: int | None) -> pb.Mode:
    """Local. A mode as servers know it; ValueError if its numbers do not fit.

    Args:
        name: One of :data:`MODES`.
        workers: How many there are.
        backup_workers: Only for ``"sync"``; fewer than workers.
        staleness: Only for ``"ssp"``, which needs it.
    """
    if name not in MODES:
        raise ValueError(f"unknown mode {name!r}; the known ones are {MODES}")
    if backup_workers and name != "sync":
        raise ValueError(f"backup_workers are for mode 'sync', not {name!r}")
    if not 0 <= backup_workers < workers:
        raise ValueError(f"of {workers} workers {backup_workers} cannot be for backup")
    if (staleness is None) != (name != "ssp"):
        raise ValueError("mode 'ssp' needs staleness, and no other mode takes it")
    if staleness is not None and staleness < 0:
        raise ValueError(f"staleness must not be negative, not {staleness}")
    return pb.Mode(name=name, backup_workers=backup_workers, staleness=staleness or 0)


def pace_of(mode: pb.Mode, connections: Sequence[Connection], worker: int) -> Pace:
    """Local. How a worker goes in a mode."""
    return _PACES[mode.name](connections, worker)
