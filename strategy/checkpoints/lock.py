"""The lock that lets saves and restores of a process run one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from mpidist import errors
from mpidist.mpi import fork
from strategy.protocol.cluster import Host


class CheckpointLock:
    """A mutex for saves and restores. A second acquisition by the same thread is an error.

    A server refuses concurrent saves by two workers, but not by two threads of one worker.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def acquire(self, call: str) -> None:
        """Acquire the lock.

        Args:
            call: The method that needs the lock, for the message.

        Raises:
            FailedPreconditionError: This thread holds the lock, or this is a forked child.
        """
        fork.check()  # the parent may have held the lock
        me = threading.get_ident()
        if self._holder == me:
            raise errors.FailedPreconditionError(
                f"{call} was called in the middle of a save or restore by the same thread, "
                f"probably in a signal handler: set a flag there, and call {call} when the save "
                "or restore has returned"
            )
        self._lock.acquire()
        self._holder = me

    def hand_over(self) -> None:
        """Let another thread release the lock."""
        self._holder = None

    def release(self) -> None:
        """Release the lock."""
        self._holder = None
        self._lock.release()

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """Hold the lock in the ``with`` block; see :meth:`acquire`."""
        self.acquire(call)
        try:
            yield
        finally:
            self.release()


_locks: WeakKeyDictionary[Host, CheckpointLock] = WeakKeyDictionary()
_finding = threading.Lock()


def checkpoint_lock_of(host: Host) -> CheckpointLock:
    """Return the lock that all strategies of a host share."""
    with _finding:
        return _locks.setdefault(host, CheckpointLock())
