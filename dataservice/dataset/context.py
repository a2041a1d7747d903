"""What a pass over a dataset depends on besides its description."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dataservice.dataset.node import Stages

# Passes of an endless ``repeat``: the epochs of a second pass over it begin here.
_PASSES = 1 << 32


def pass_epoch(epoch: int, number: int, count: int | None) -> int:
    """Return the epoch of one of several passes inside an epoch; see :meth:`Context.enter`."""
    return epoch * (_PASSES if count is None else count) + number


class SplitsFailed(BaseException):
    """The indices of what is to be evaluated cannot be had.

    It is no ``Exception``, because it is the error of no element: nothing may ignore it.

    Args:
        error: The reason.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Splits(Protocol):
    """The source indices that this process evaluates.

    All passes over the source share one sequence of positions. Index ``k * n + i`` stands for
    index i of pass k over a source of n indices, see :attr:`Share.period`.

    Attributes:
        start: Position of the first index of the next pass.
        marked: Position that :meth:`mark` noted last.
    """

    start: int
    marked: int

    def run(self, position: int) -> range:
        """Return the ascending indices from a position on, as many as are known; none at the end.

        Raises:
            SplitsFailed: They cannot be had.
        """

    def mark(self, position: int) -> None:
        """Note that the state that is being taken needs no index before a position."""


@dataclass(frozen=True)
class Share:
    """The place of a pass among the indices that this process evaluates.

    Attributes:
        splits: The indices.
        period: Number of indices of one pass over the source of the whole dataset.
        ordinal: Number of passes over the source before this one.
        offset: First index of the node that reads indices, if it is one of several that
            ``concatenate`` reads one after the other.
    """

    splits: Splits
    period: int
    ordinal: int = 0
    offset: int = 0

    @property
    def first(self) -> int:
        """Index of the first element of the pass."""
        return self.ordinal * self.period + self.offset


class Closable(Protocol):
    """Something that waits, and that any thread can end."""

    def close(self) -> None:
        """End it. A second call does nothing."""


class Scope:
    """What may wait inside a pass that one thread evaluates and another one can give up.

    Attributes:
        closed: Whether the pass has been given up. Everything that waits in it then ends.
    """

    def __init__(self) -> None:
        self.closed = False
        # Reentrant, because garbage may be collected anywhere, and close what it holds.
        self._lock = threading.RLock()
        self._waiting: weakref.WeakSet[Closable] = weakref.WeakSet()

    def add(self, waiting: Closable) -> None:
        """Close something with the scope, at once if that is closed."""
        with self._lock:
            self._waiting.add(waiting)
        if self.closed:
            waiting.close()

    def close(self) -> None:
        """Close everything. A second call does nothing."""
        self.closed = True
        with self._lock:
            waiting = list(self._waiting)
        for each in waiting:
            each.close()


@dataclass(frozen=True)
class Context:
    """What one pass depends on besides the description.

    Attributes:
        seed: Seed of the nodes that have none of their own. It is the same in all processes that
            evaluate parts of the pass.
        epoch: Number of the pass, for example of this dataset in the program, or in a ``repeat``.
        scope: Closes what waits for others in the pass; None if nobody else can give it up.
        stages: Measures the nodes; None if nobody wants to know.
        part: Tells the randomness of this process from that of others, where orders need not agree.
        numbered: Whether elements go by their numbers, since another process may have to go on
            with the pass: their order must not be that in which they happen to be ready.
        share: The source indices that this process evaluates; None for all of them.
    """

    seed: tuple[int, ...]
    epoch: int = 0
    scope: Scope | None = None
    stages: Stages | None = None
    part: tuple[int, ...] = ()
    numbered: bool = False
    share: Share | None = None

    def enter(self, number: int, count: int | None = None) -> Context:
        """Return the context of one of several passes inside this one.

        Args:
            number: Number of the pass, from 0.
            count: How many there are; None if there is no end of them.
        """
        share = self.share
        if share is not None:
            ordinal = pass_epoch(share.ordinal, number, count)
            share = dataclasses.replace(share, ordinal=ordinal)
        return dataclasses.replace(self, epoch=pass_epoch(self.epoch, number, count), share=share)

    def branch(self, number: int) -> Context:
        """Return the context of one of several passes beside each other, with its own seed."""
        return dataclasses.replace(self, seed=(*self.seed, number))

    def alone(self) -> Context:
        """Return the context of a pass that this process evaluates as a whole."""
        return dataclasses.replace(self, share=None)

    @property
    def own_seed(self) -> tuple[int, ...]:
        """The seed of what is random in this process alone."""
        return *self.seed, *self.part
