"""What one thread makes ahead for another: a queue with an end, errors, and a way to give up."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from typing import Any

from mpidist import errors

OVER = object()
"""Comes behind the last."""


class Failure:
    """An error in the place of what could not be made.

    Args:
        error: The error. One that cannot be pickled becomes an UnknownError where this is.

    Attributes:
        error: The same.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @property
    def taken(self) -> list[Any]:
        """What a state has in its place."""
        return [self]

    def hand_over(self) -> Any:
        """Local. Raises it."""
        try:
            raise self.error
        finally:
            del self  # the traceback refers to this frame

    def __reduce__(self) -> tuple[type[Failure], tuple[BaseException]]:
        error = self.error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception as why:
            name = type(error).__qualname__
            error = errors.UnknownError(f"{name}: {error} ({name} cannot be pickled: {why})")
        return Failure, (error,)


class Channel:
    """What lies ready, in order; behind a failure, nothing is made until more is asked for.

    Args:
        size: How much may lie ready.

    Attributes:
        making: Held while a step is made and added.
        closed: Whether nobody wants steps any more.
    """

    def __init__(self, size: int) -> None:
        self.making = threading.Lock()
        self.closed = False
        self._size = size
        # Of reentrant locks: garbage is collected anywhere, and then close() is called.
        self._changed = threading.Condition()
        self._steps: deque[Any] = deque()
        self._failed = False

    def wait_for_room(self) -> bool:
        """Local. Wait until another one may be made; False if nobody wants it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or (len(self._steps) < self._size and not self._failed)
            )
            return not self.closed

    def add(self, step: Any) -> None:
        """Local. Add what has been made, a Failure, or OVER; nothing if nobody wants it."""
        with self._changed:
            if not self.closed:
                self._steps.append(step)
                self._failed = isinstance(step, Failure)
                self._changed.notify_all()

    def waiting(self) -> list[Any]:
        """Local. What lies ready now."""
        with self._changed:
            return [step for step in self._steps if step is not OVER]

    def take(self) -> Any:
        """Local. The next one, or OVER, which stays the last; waits for it."""
        with self._changed:
            if not self._steps:
                self._failed = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._steps or self.closed)
            if self.closed or self._steps[0] is OVER:
                return OVER
            self._changed.notify_all()
            return self._steps.popleft()

    def close(self) -> None:
        """Local. Nobody wants anything any more; idempotent."""
        with self._changed:
            self.closed = True
            self._steps.clear()
            self._changed.notify_all()
