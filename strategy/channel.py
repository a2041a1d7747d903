"""A bounded queue between a producer and a consumer thread, with an end, errors and close()."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from typing import Any

from mpidist import errors

OVER = object()
"""The end of the queue."""


class Failure:
    """An error in the queue, in place of the step that could not be made.

    Args:
        error: The error. Pickling replaces an error that cannot be pickled by an UnknownError.

    Attributes:
        error: The error.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @property
    def taken(self) -> list[Any]:
        """The entry of a saved state for this error, in a list."""
        return [self]

    def hand_over(self) -> Any:
        """Raise the error."""
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
    """A queue of prefetched steps.

    After a failure, the producer makes no step until the consumer requests one.

    Args:
        size: Maximum number of steps.

    Attributes:
        making: Lock that the producer holds while it makes and adds a step.
        closed: True if the consumer takes no more steps.
    """

    def __init__(self, size: int) -> None:
        self.making = threading.Lock()
        self.closed = False
        self._size = size
        # The lock is reentrant: the garbage collector may call close() inside any method.
        self._changed = threading.Condition()
        self._steps: deque[Any] = deque()
        self._failed = False

    def wait_for_room(self) -> bool:
        """Wait until the producer may make a step. Return False if the queue was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or (len(self._steps) < self._size and not self._failed)
            )
            return not self.closed

    def add(self, step: Any) -> None:
        """Add a step, a Failure or OVER, unless the queue was closed."""
        with self._changed:
            if not self.closed:
                self._steps.append(step)
                self._failed = isinstance(step, Failure)
                self._changed.notify_all()

    def waiting(self) -> list[Any]:
        """Return the steps in the queue, without OVER."""
        with self._changed:
            return [step for step in self._steps if step is not OVER]

    def take(self) -> Any:
        """Wait for the next step and remove it. At the end or after close(), return OVER."""
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
        """Drop all steps and take no more; idempotent."""
        with self._changed:
            self.closed = True
            self._steps.clear()
            self._changed.notify_all()
