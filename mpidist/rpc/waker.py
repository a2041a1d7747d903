"""Wake-ups for threads that wait for messages.

The pattern is Leader/Followers (Schmidt et al., 2000).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress


class Waker:
    """Wakes the threads that wait for messages.

    One thread leads: it sleeps in epoll on all sockets. The other threads sleep on a condition
    until the leader, or a thread that has delivered a message, wakes them.

    Args:
        set_idle: Called by the leader before it sleeps. It returns False to keep the leader awake.
        clear_idle: Called by the leader after its sleep, even if it did not sleep.
    """

    def __init__(
        self,
        set_idle: Callable[[], bool] = lambda: True,
        clear_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._set_idle = set_idle
        self._clear_idle = clear_idle
        self._epoll = select.epoll()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._event, select.EPOLLIN)
        self._changed = threading.Condition(threading.Lock())
        self._has_leader = False
        self._wakes = 0  # calls of wake(), and ends of leadership
        self.waiting = 0
        """The number of waiting threads."""

    def watch(self, descriptor: int) -> None:
        """Wake the leader when a descriptor becomes readable."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def ignore(self, descriptor: int) -> None:
        """Stop watching a descriptor. Call this before it is closed."""
        self._epoll.unregister(descriptor)

    def wake(self) -> None:
        """Wake all waiting threads."""
        if self.waiting:
            with self._changed:
                self._wakes += 1
                if self._has_leader:
                    os.eventfd_write(self._event, 1)
                self._changed.notify_all()

    def wait(self, seconds: float, done: Callable[[], bool]) -> None:
        """Sleep until a message may have arrived, or another thread calls :meth:`wake`.

        Args:
            seconds: Upper limit.
            done: Returns True if there is no need to sleep. The thread that makes it true must
                call :meth:`wake`.
        """
        with self._changed:
            self.waiting += 1
            leads, self._has_leader = not self._has_leader, True
            wakes = self._wakes
        try:
            if done():  # not under the lock, because it can end a call, which needs other locks
                return
            if not leads:
                with self._changed:
                    if self._wakes == wakes:
                        self._changed.wait(seconds)
            elif self._set_idle():
                self._epoll.poll(seconds)
        finally:  # a signal handler may have raised
            self._end_wait(leads)

    def _end_wait(self, leads: bool) -> None:
        if leads:
            self._clear_idle()
        with self._changed:
            self.waiting -= 1
            if leads:
                self._has_leader = False
                self._wakes += 1
                with suppress(BlockingIOError):  # the event is not set
                    os.eventfd_read(self._event)
                self._changed.notify()  # another thread must lead

    def close(self) -> None:
        """Close the descriptors; idempotent. No thread may wait."""
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._event)
