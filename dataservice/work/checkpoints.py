"""Where a task's iterator was, now and then: from there another one can go on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset.node import ElementIterator
from dataservice.proto import dataservice_pb2 as pb
from dataservice.wire import dumps
from mpidist.errors import UnimplementedError

# States are taken so often, and so that taking them costs at most a fiftieth of the time.
_PERIOD_S = 0.1
_SHARE = 50


@dataclass(frozen=True)
class _Taken:
    """A state of the iterator.

    Attributes:
        index: Elements before it.
        state: The state.
        nbytes: About how many bytes its pickle has.
        position: Position of the next source index.
    """

    index: int
    state: Any
    nbytes: int
    position: int


class Checkpoints:
    """Keeps the newest state that no consumer is behind, and those after it.

    Args:
        first: Where the task began.
    """

    def __init__(self, first: pb.Checkpoint) -> None:
        self._first = first
        self._taken: deque[_Taken] = deque()
        self._lock = threading.Lock()
        self._due = 0.0
        self._impossible: UnimplementedError | None = None

    @property
    def due(self) -> bool:
        """Local. Whether it is time to take one."""
        return self._impossible is None and time.monotonic() >= self._due

    def take(
        self,
        index: int,
        elements: ElementIterator,
        position: Callable[[], int],
        needed: int,
    ) -> None:
        """Local. Take one.

        Args:
            index: How many elements the iterator has given, from the beginning of the part.
            elements: The iterator; nobody else uses it now.
            position: Gives the position of the next source index, when the state is taken.
            needed: Elements before it are not needed any more.
        """
        began = time.monotonic()
        try:
            state = elements.get_state()
        except UnimplementedError as error:
            # Another worker can evaluate the part anew, from its beginning.
            self._impossible = error
            return
        taken = _Taken(index, state, size_of(state), position())
        with self._lock:
            self._taken.append(taken)
            while len(self._taken) > 1 and self._taken[1].index <= needed:
                self._taken.popleft()
        cost = time.monotonic() - began
        self._due = began + cost + max(_PERIOD_S, _SHARE * cost)

    def before(self, index: int) -> pb.Checkpoint:
        """Local. The newest one that is not after an element.

        Raises:
            UnimplementedError: A source cannot say where it is, or what the state holds cannot be
                pickled.
        """
        if self._impossible is not None:
            raise self._impossible
        with self._lock:
            fit = [taken for taken in self._taken if taken.index <= index]
        if not fit:
            return self._first
        newest = fit[-1]
        try:
            state = dumps(newest.state)
        except Exception as error:
            self._impossible = UnimplementedError(
                f"the state of an iterator cannot be pickled: {error!r}"
            )
            raise self._impossible from error
        return pb.Checkpoint(index=newest.index, state=state, position=newest.position)

    def newest_index(self, index: int, limit: int) -> tuple[int, int]:
        """Return which state :meth:`before` gives, of those of a limited size.

        Args:
            index: As of :meth:`before`.
            limit: The largest size, in bytes.

        Returns:
            The index of the newest state within the limit, -1 if there is none; and the size of
            the newest one, in bytes, which may be beyond the limit.
        """
        with self._lock:
            fit = [taken for taken in self._taken if taken.index <= index]
        small = max([taken.index for taken in fit if taken.nbytes <= limit], default=-1)
        return small, fit[-1].nbytes if fit else 0


def size_of(state: Any) -> int:
    """Return about how many bytes a pickle of something has, without pickling it."""
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
