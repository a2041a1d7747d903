"""Who has promised to take part in making a further segment of a server's memory. Pure.

The collective that makes a segment blocks everybody in it, so nobody may enter it before all
have promised to. A promise comes with the variable that there is no room for: workers create the
same variables in the same order, so that each of them comes to the one that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mpidist import errors

Token = TypeVar("Token")


@dataclass(frozen=True)
class Creation:
    """A variable as a worker creates it.

    Attributes:
        name: Of the variable.
        shape: Of the variable.
        dtype: Name of its dtype.
        ordinal: How many variables the worker's strategy created before.
        strategy: Which strategy of the worker it is: strategies are compared in the order in which
            workers make them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ordinal: int
    strategy: int

    def conflicts_with(self, other: Creation) -> bool:
        """Local. Whether no two workers of one program can create both."""
        if self.name == other.name:
            mine, its = ((c.shape, c.dtype, c.ordinal) for c in (self, other))
            return mine != its
        return (self.strategy, self.ordinal) == (other.strategy, other.ordinal)

    def __str__(self) -> str:
        return f"variable {self.name!r} as number {self.ordinal}, {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class _Promise(Generic[Token]):
    worker: int
    creation: Creation
    token: Token


class Growth(Generic[Token]):
    """The promises for the next segment.

    Args:
        workers: Those who must promise, one for each process beside the server's own. Others may;
            they are told when it is over.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self.workers = tuple(workers)
        self._promises: list[_Promise[Token]] = []

    def check(self, worker: int, creation: Creation) -> None:
        """Local. Compare a creation with those that others have promised for.

        Raises:
            InvalidArgumentError: They are not of one program; the message names both workers.
        """
        for promise in self._promises:
            if promise.worker != worker and promise.creation.conflicts_with(creation):
                raise errors.InvalidArgumentError(
                    f"worker {worker} creates {creation}, and worker {promise.worker} "
                    f"{promise.creation}: all workers must create the same variables in the same "
                    "order"
                )

    def promise(self, worker: int, creation: Creation, token: Token) -> bool:
        """Local. Take a promise.

        Args:
            worker: Whose.
            creation: What it creates.
            token: What to answer it by.

        Returns:
            Whether all have promised for this variable: go, and :meth:`finish`.

        Raises:
            InvalidArgumentError: See :meth:`check`; the promise is not taken.
        """
        self.check(worker, creation)
        self._promises.append(_Promise(worker, creation, token))
        return not self.missing(creation.name)

    def missing(self, name: str) -> list[int]:
        """Local. Who has not promised for this variable."""
        have = {promise.worker for promise in self._promises if promise.creation.name == name}
        return [worker for worker in self.workers if worker not in have]

    def withdraw(self, worker: int, creation: Creation) -> list[Token]:
        """Local. Forget one worker's promises for a variable; gives their tokens."""
        gone = [p for p in self._promises if (p.worker, p.creation) == (worker, creation)]
        self._promises = [p for p in self._promises if p not in gone]
        return [promise.token for promise in gone]

    def forget(self, name: str) -> list[Token]:
        """Local. Forget all promises for a variable; gives their tokens."""
        gone = [promise for promise in self._promises if promise.creation.name == name]
        self._promises = [p for p in self._promises if p not in gone]
        return [promise.token for promise in gone]

    def finish(self) -> tuple[list[Token], list[Token]]:
        """Local. Forget all promises.

        Returns:
            The tokens of those who enter the collective, one for each worker who must, and those
            of all others.
        """
        entering: dict[int, Token] = {}
        others: list[Token] = []
        for promise in self._promises:
            if promise.worker in self.workers and promise.worker not in entering:
                entering[promise.worker] = promise.token
            else:
                others.append(promise.token)
        self._promises = []
        return list(entering.values()), others
