"""Checkpoints of a task: states of its iterator, from which another worker can continue."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset.base import ElementIterator
from dataservice.payload import dumps, indexed_checkpoint
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import UnimplementedError

logger = logging.getLogger(__name__)

# The shortest time between two states. Taking them costs at most a fiftieth of the time.
_PERIOD_S = 0.1
_SHARE = 50
# The largest state that the dispatcher keeps for the next worker of the part.
LARGEST_STATE = 1 << 20


@dataclass(frozen=True)
class _Taken:
    """A state of the iterator.

    Attributes:
        index: Number of elements before it.
        state: The state.
        nbytes: Estimated size of its pickle in bytes.
        position: Position of the next source index.
    """

    index: int
    state: Any
    nbytes: int
    position: int


class Checkpoints:
    """Keeps the newest state that all consumers have passed, and all later states.

    An indexed dataset has a state at every element, so none is kept.

    Args:
        first: The checkpoint that the task began from.
        where: The task and its worker in words, for the log.
        period_s: The shortest time between two states, in seconds, if longer than _PERIOD_S.
        indexed: Whether the dataset is indexed.
    """

    def __init__(
        self, first: pb.Checkpoint, where: str, period_s: float = 0.0, *, indexed: bool = False
    ) -> None:
        self._first = first
        self._indexed = indexed
        self._where = where
        self._period_s = period_s
        self._taken: deque[_Taken] = deque()
        self._lock = threading.Lock()
        self._due = 0.0
        self._impossible: UnimplementedError | None = None
        self._reported = -1  # index of the newest checkpoint that the dispatcher has
        self._has_warned = False

    def is_due(self, *, early: bool = False) -> bool:
        """Return whether to take a state now.

        Args:
            early: Whether to ignore the shortest time between two states.
        """
        return self._impossible is None and (early or time.monotonic() >= self._due)

    def take(
        self,
        index: int,
        elements: ElementIterator,
        position: Callable[[], int],
        needed: int,
    ) -> None:
        """Take a state.

        Args:
            index: Number of elements of the part before the position of the iterator.
            elements: The iterator; no other thread uses it meanwhile.
            position: Returns the position of the next source index; called after the state is
                taken.
            needed: Elements before this index are not needed any more.
        """
        began = time.monotonic()
        if self._indexed:
            self._due = began + max(_PERIOD_S, self._period_s)
            return
        try:
            state = elements.get_state()
        except UnimplementedError as error:
            # Another worker can evaluate the part again from its beginning.
            self._impossible = error
            logger.info("%s has no checkpoints: %s", self._where, error)
            return
        taken = _Taken(index, state, size_of(state), position())
        with self._lock:
            self._taken.append(taken)
            while len(self._taken) > 1 and self._taken[1].index <= needed:
                self._taken.popleft()
        cost = time.monotonic() - began
        self._due = began + cost + max(_PERIOD_S, self._period_s, _SHARE * cost)

    def before(self, index: int) -> pb.Checkpoint:
        """Return the newest checkpoint at or before an element.

        Raises:
            UnimplementedError: A source has no state, or the state cannot be pickled.
        """
        if self._impossible is not None:
            raise self._impossible
        if self._indexed and index > self._first.index:
            return indexed_checkpoint(index)
        newest = self._newest(index)
        if newest is None:
            return self._first
        try:
            state = dumps(newest.state)
        except Exception as error:
            self._impossible = UnimplementedError(
                f"the state of an iterator cannot be pickled: {error!r}"
            )
            logger.info("%s has no checkpoints: %s", self._where, self._impossible)
            raise self._impossible from error
        return pb.Checkpoint(index=newest.index, state=state, position=newest.position)

    def report(self, needed: int) -> pb.Checkpoint | None:
        """Return a checkpoint for the dispatcher, if there is a new one of at most LARGEST_STATE.

        Larger states are not pickled. The first one is logged.

        Args:
            needed: Index of the first element that is still needed.
        """
        if self._indexed:
            if needed <= max(self._reported, self._first.index):
                return None
            self._reported = needed
            return indexed_checkpoint(needed)
        newest, small = self._newest(needed), self._newest(needed, LARGEST_STATE)
        if newest is not None and newest is not small:
            self._warn(newest.nbytes)
        if small is None or small.index <= self._reported or self._impossible is not None:
            return None
        self._reported = small.index
        try:
            checkpoint = self.before(small.index)
        except UnimplementedError:
            return None
        if len(checkpoint.state) > LARGEST_STATE:  # the estimate was too low
            self._warn(len(checkpoint.state))
            return None
        return checkpoint

    def _newest(self, index: int, limit: float = float("inf")) -> _Taken | None:
        """Return the newest state of at most ``limit`` bytes at or before an element."""
        with self._lock:
            fit = [each for each in self._taken if each.index <= index and each.nbytes <= limit]
        return fit[-1] if fit else None

    def _warn(self, nbytes: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s: the state of its iterator has about %d bytes, and the dispatcher keeps at most "
            "%d. If this worker is lost, another one evaluates the part again from its beginning, "
            "or from its last smaller state. A smaller shuffle buffer, or a shuffle before the map "
            "that makes large elements, makes the state smaller",
            self._where,
            nbytes,
            LARGEST_STATE,
        )


def size_of(state: Any) -> int:
    """Return the approximate size of an object's pickle in bytes, without pickling."""
    total, left, seen = 0, [state], set[int]()
    while left:
        each = left.pop()
        if isinstance(each, np.ndarray) and each.dtype != object:
            total += each.nbytes
        elif isinstance(each, str | bytes | bytearray):
            total += len(each)
        elif id(each) not in seen and not isinstance(each, type):
            seen.add(id(each))
            if isinstance(each, dict):
                left += [*each, *each.values()]
            elif isinstance(each, list | tuple | set | deque | np.ndarray):
                left += each
            else:
                left.append(getattr(each, "__dict__", ""))
                total += 8
    return total
