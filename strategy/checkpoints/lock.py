"""The lock that lets one thread of a process at a time save or restore."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from mpidist import errors
from strategy.shared.host import Host


class CheckpointLock:
    """A mutex for saves and restores. A second acquisition by the same thread is an error.

    A server refuses concurrent saves by two workers, but not by two threads of one worker.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """Hold the lock in the ``with`` block.

        Args:
            call: The method that needs the lock, for the message.

        Raises:
            FailedPreconditionError: This thread holds the lock.
        """
        me = threading.get_ident()
        if self._holder == me:
            raise errors.FailedPreconditionError(
                f"{call} was called in the middle of a save or restore by the same thread, "
                f"probably in a signal handler: set a flag there, and call {call} when the save "
                "or restore has returned"
            )
        with self._lock:
            try:
                self._holder = me
                yield
            finally:
                self._holder = None


_locks: WeakKeyDictionary[Host, CheckpointLock] = WeakKeyDictionary()
_finding = threading.Lock()


def checkpoint_lock_of(host: Host) -> CheckpointLock:
    """Return the lock that all strategies of a host share."""
    with _finding:
        return _locks.setdefault(host, CheckpointLock())
