"""The order of restores by the workers of one strategy. Pure.

The chief performs each restore, and the other workers wait for it. All workers restore the same
checkpoints in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mpidist import errors

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointId:
    """A checkpoint.

    Attributes:
        path: Its folder.
        index: Content of the index file; empty if the worker cannot read the checkpoint.
    """

    path: str
    index: bytes


@dataclass
class _Wait(Generic[T]):
    """A worker that waits for the chief."""

    worker: int
    number: int
    wanted: CheckpointId
    request: T


Answers = list[tuple[T, errors.Error | None]]
"""Requests to answer, each with an error or None."""


@dataclass
class Restores(Generic[T]):
    """The restores under one name of a strategy."""

    _done: list[CheckpointId] = field(default_factory=list)
    _counts: dict[int, int] = field(default_factory=dict)  # completed restores by worker
    _waiting: dict[int, _Wait[T]] = field(default_factory=dict)  # by worker
    _failures: dict[str, str] = field(default_factory=dict)  # of the last restore of each path

    def count(self, worker: int) -> int:
        """Return the number of restores that a worker has completed."""
        return self._counts.get(worker, 0)

    def wait(self, worker: int, number: int, wanted: CheckpointId, request: T) -> Answers[T]:
        """Add a worker that waits for its restore of a number. Return the requests to answer."""
        # This replaces an earlier request of the worker. The caller of that request was interrupted
        # or has timed out, so the request needs no reply.
        self._waiting[worker] = _Wait(worker, number, wanted, request)
        return self._answers()

    def end(self, worker: int, restored: CheckpointId, problem: str) -> Answers[T]:
        """End a restore of the chief. Return the requests to answer.

        Args:
            worker: Index of the chief.
            restored: The checkpoint.
            problem: Why the restore has failed; empty if it has not.
        """
        if problem:
            self._failures[restored.path] = (
                f"worker {worker} could not restore {restored.path!r} for all workers: {problem}"
            )
        else:
            self._failures.pop(restored.path, None)
            self._done.append(restored)
            self._counts[worker] = len(self._done)
        return self._answers()

    def _answers(self) -> Answers[T]:
        answers: Answers[T] = []
        for one in list(self._waiting.values()):
            failure = self._failures.get(one.wanted.path)
            if one.number <= len(self._done):
                answers.append((one.request, self._check(one)))
            elif failure is not None:  # also if the chief has failed before the worker asked
                answers.append((one.request, errors.AbortedError(failure)))
            else:
                continue
            del self._waiting[one.worker]
        return answers

    def _check(self, wait: _Wait[T]) -> errors.Error | None:
        """Return an error if the chief has restored another checkpoint."""
        done = self._done[wait.number - 1]
        if done.path == wait.wanted.path and wait.wanted.index in (b"", done.index):
            self._counts[wait.worker] = wait.number
            return None
        another = (
            ", which is another checkpoint of this name," if done.path == wait.wanted.path else ""
        )
        return errors.InvalidArgumentError(
            f"worker {wait.worker} restores {wait.wanted.path!r} as its restore number "
            f"{wait.number}, but the chief restored {done.path!r}{another} as that number: restore "
            "the same checkpoints in the same order on all workers; let one worker choose "
            "the path and tell the others"
        )
