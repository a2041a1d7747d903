"""Who may go on: the steps of synchronous workers, and the clocks of those on a long leash. Pure.

One server, the first, decides for all. Workers that leave count no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")  # what stands for a worker that waits

# As optimizers describe a learning rate schedule, and the code in it.
_SCHEDULE = ", learning rate schedule "
_CODE = re.compile(r"(\S+) \(code ([0-9a-f]{8})\)")


@dataclass(frozen=True)
class Decision:
    """What becomes of a worker's gradients.

    Attributes:
        step: In which step they count; if they do not, the step that the worker goes on with.
        members: The workers whose gradients make the step, ascending; empty if these come too late,
            or there are none.
        problem: Why there is no such step: workers give gradients that do not belong together.
    """

    step: int
    members: tuple[int, ...]
    problem: str = ""


class Rounds(Generic[T]):
    """Synchronous steps, each made by those workers that come first.

    As SyncReplicasOptimizer of TensorFlow, after Chen et al., "Revisiting Distributed Synchronous
    SGD", 2016: with n workers and b of them for backup, a step has the gradients of the first
    n - b; those of the others are dropped.

    Args:
        workers: Who takes part.
        backups: How many of them a step can do without; fewer than there are.
    """

    def __init__(self, workers: Iterable[int], backups: int) -> None:
        self._workers = set(workers)
        self._needed = len(self._workers) - backups
        self._step = 0
        self._entered: dict[int, T] = {}
        self._given: dict[int, str] = {}

    def enter(
        self, worker: int, step: int, waiting: T, gives: str | None = ""
    ) -> list[tuple[T, Decision]]:
        """Local. A worker has come to a step.

        Args:
            worker: Which.
            step: Which; from 0.
            waiting: Stands for it until it is answered.
            gives: What its gradients are of, in words that must be the same for all; None: it has
                none. A step for which no worker has some is none: all go on with it again.

        Returns:
            Who is to be answered, and what.

        Raises:
            ValueError: It has gradients for this step already, or is ahead of it.
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

    def leave(self, worker: int) -> list[tuple[T, Decision]]:
        """Local. A worker will give no more gradients; see :meth:`enter` for what it returns."""
        self._workers.discard(worker)
        self._entered.pop(worker, None)
        self._given.pop(worker, None)
        return self._decide()

    def missing(self) -> list[int]:
        """Local. The workers that have no gradients for this step yet."""
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
                f"worker {other} of {given[other]}: {_difference(given[first], given[other])}in "
                "mode 'sync' all workers must give gradients of the same variables in the same "
                "order, for the same optimizer"
            )
            return [(one, Decision(self._step, (), problem)) for one in waiting.values()]
        decision = Decision(self._step, tuple(sorted(given)))
        self._step += 1 if given else 0
        nothing = Decision(self._step, ())
        return [(one, decision if worker in given else nothing) for worker, one in waiting.items()]


def _difference(one: str, other: str) -> str:
    """Say how two learning rate schedules differ; nothing if more than the schedules differs."""
    if one.partition(_SCHEDULE)[0] != other.partition(_SCHEDULE)[0]:
        return ""
    if _CODE.sub(r"\1", one) != _CODE.sub(r"\1", other):
        return "the learning rate schedules differ; "
    pairs = zip(_CODE.findall(one), _CODE.findall(other), strict=True)
    names = dict.fromkeys(name for (name, own), (_, others) in pairs if own != others)
    return (
        f"the learning rate schedules differ in the code of {' and '.join(names)}, in its "
        "constants, or in globals or classes that it uses; "
    )


class Clocks(Generic[T]):
    """Workers of which none gets more than a number of steps ahead of another.

    The stale synchronous parallel of Ho et al., "More Effective Distributed ML via a Stale
    Synchronous Parallel Parameter Server", NIPS 2013: a worker whose clock is c reads what all
    others have changed before their clocks passed c - bound.

    Args:
        workers: Who takes part.
        bound: How many steps a worker may be ahead of the slowest.
    """

    def __init__(self, workers: Iterable[int], bound: int) -> None:
        self._clocks = dict.fromkeys(workers, 0)
        self._bound = bound
        self._waiting: list[tuple[int, T]] = []

    def advance(self, worker: int, clock: int, waiting: T) -> list[T]:
        """Local. A worker's changes up to a clock have been applied, and it wants to go on.

        Args:
            worker: Which.
            clock: How many steps it has made.
            waiting: Stands for it until it may go on.

        Returns:
            Who may go on.
        """
        if worker in self._clocks:
            self._clocks[worker] = max(clock, self._clocks[worker])
        self._waiting.append((clock, waiting))
        return self._free()

    def leave(self, worker: int) -> list[T]:
        """Local. A worker makes no more steps; gives who may go on."""
        self._clocks.pop(worker, None)
        return self._free()

    def missing(self) -> list[int]:
        """Local. The slowest workers, for which others wait."""
        slowest = min(self._clocks.values(), default=0)
        return sorted(worker for worker, clock in self._clocks.items() if clock == slowest)

    def _free(self) -> list[T]:
        latest = min(self._clocks.values(), default=float("inf")) + self._bound
        free = [waiting for clock, waiting in self._waiting if clock <= latest]
        self._waiting = [(clock, waiting) for clock, waiting in self._waiting if clock > latest]
        return free
