"""The steps of synchronous workers and the clocks of bounded staleness (SSP). Pure.

The first server decides for all servers. Workers that have left do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")  # the request of a waiting worker


@dataclass(frozen=True)
class Decision:
    """The decision about the gradients of a worker in a step.

    Attributes:
        step: The step that takes the gradients. Without members, the step at which the worker
            continues.
        members: The workers whose gradients are averaged in the step, ascending. Empty if the
            gradients came too late, or the worker has none.
        problem: Error message if workers have gradients of different variables or optimizers.
    """

    step: int
    members: tuple[int, ...]
    problem: str = ""


class Rounds(Generic[T]):
    """Synchronous steps with backup workers.

    With n workers, b of them backups, a step takes the gradients of the first n - b workers and
    drops the gradients of the others. Source: Chen et al., "Revisiting Distributed Synchronous
    SGD", 2016, as in TensorFlow's SyncReplicasOptimizer.

    Args:
        workers: Indices of the workers.
        backups: Number of backup workers, less than the number of workers.
    """

    def __init__(self, workers: Iterable[int], backups: int) -> None:
        self._all = frozenset(workers)
        self._workers = set(self._all)
        self._needed = len(self._workers) - backups
        self._step = 0
        self._entered: dict[int, T] = {}
        self._given: dict[int, str] = {}

    def enter(
        self, worker: int, step: int, waiting: T, gives: str | None = ""
    ) -> list[tuple[T, Decision]]:
        """Count a worker in a step.

        Args:
            worker: Index of the worker.
            step: Number of the step, from 0.
            waiting: Request of the worker.
            gives: Description of its gradients, which must be the same for all workers; None
                without gradients. If no worker has gradients, all workers repeat the step.

        Returns:
            The requests to answer, each with its decision.

        Raises:
            ValueError: The worker has entered this step already, or is ahead of it.
        """
        if step < self._step:
            return [(waiting, Decision(self._step, ()))]
        if step > self._step or worker in self._entered:
            raise ValueError(
                f"worker {worker} gives gradients for step {step} again, or too early: the step "
                f"is {self._step}"
            )
        self._entered[worker] = waiting
        if gives is not None:
            self._given[worker] = gives
        return self._decide()

    def join(self, worker: int) -> int:
        """Wait for a worker from now on, also if it has left before. Return the current step."""
        self._workers.add(worker)
        return self._step

    def leave(self, worker: int) -> list[tuple[T, Decision]]:
        """Remove a worker that makes no more steps. See :meth:`enter` for the result."""
        self._workers.discard(worker)
        self._entered.pop(worker, None)
        self._given.pop(worker, None)
        if not self._workers:  # the next strategies of this name begin with all workers
            self._workers = set(self._all)
        return self._decide()

    def missing(self) -> list[int]:
        """Return the workers that have not entered the current step."""
        return sorted(self._workers - set(self._entered))

    def _decide(self) -> list[tuple[T, Decision]]:
        everybody = len(self._entered) == len(self._workers)
        if not self._entered or not (everybody or len(self._given) >= self._needed):
            return []
        given, waiting = self._given, self._entered
        self._entered, self._given = {}, {}
        first = min(given, default=0)
        other = next((worker for worker in sorted(given) if given[worker] != given[first]), None)
        if other is not None:
            problem = (
                f"in step {self._step} worker {first} gives gradients of {given[first]}, and "
                f"worker {other} of {given[other]}: in mode 'sync' all workers must give "
                "gradients of the same variables in the same order, for the same optimizer with "
                "the same learning rates"
            )
            return [(one, Decision(self._step, (), problem)) for one in waiting.values()]
        decision = Decision(self._step, tuple(sorted(given)))
        self._step += 1 if given else 0
        nothing = Decision(self._step, ())
        return [(one, decision if worker in given else nothing) for worker, one in waiting.items()]


class Clocks(Generic[T]):
    """The clocks of workers under bounded staleness: the number of steps that each has made.

    A worker at clock c reads all changes that other workers made before their clocks passed
    c - bound. Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server", NIPS 2013.

    Args:
        workers: Indices of the workers.
        bound: Number of steps that a worker may be ahead of the slowest.
    """

    def __init__(self, workers: Iterable[int], bound: int) -> None:
        self._all = tuple(workers)
        self._clocks = dict.fromkeys(self._all, 0)
        self._latest = 0
        self._bound = bound
        self._waiting: list[tuple[int, T]] = []

    def advance(self, worker: int, clock: int, waiting: T) -> list[T]:
        """Set the clock of a worker after its changes up to that clock have been applied.

        Args:
            worker: Index of the worker.
            clock: Number of steps that the worker has made.
            waiting: Request of the worker, which waits to continue.

        Returns:
            The requests of the workers that may continue.
        """
        if worker in self._clocks:
            self._clocks[worker] = max(clock, self._clocks[worker])
        self._latest = max(clock, self._latest)
        self._waiting.append((clock, waiting))
        return self._free()

    def join(self, worker: int) -> int:
        """Wait for a worker from now on, also if it has left before. Return its first clock."""
        slowest = min(self._clocks.values(), default=0)
        return self._clocks.setdefault(worker, slowest)

    def leave(self, worker: int) -> list[T]:
        """Remove a worker that makes no more steps. See :meth:`advance` for the result."""
        self._clocks.pop(worker, None)
        if not self._clocks:  # the next strategies of this name begin with all workers
            self._clocks = dict.fromkeys(self._all, self._latest)
        return self._free()

    def missing(self) -> list[int]:
        """Return the slowest workers, for which others wait."""
        slowest = min(self._clocks.values(), default=0)
        return sorted(worker for worker, clock in self._clocks.items() if clock == slowest)

    def _free(self) -> list[T]:
        latest = min(self._clocks.values(), default=float("inf")) + self._bound
        free = [waiting for clock, waiting in self._waiting if clock <= latest]
        self._waiting = [(clock, waiting) for clock, waiting in self._waiting if clock > latest]
        return free
