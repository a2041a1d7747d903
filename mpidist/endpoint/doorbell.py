"""How threads sleep until a socket has something to receive, instead of asking again and again."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress


class Doorbell:
    """Wakes the threads that wait for messages.

    One of them leads: it sleeps at the descriptors of all sockets; the others sleep until it, or
    anybody else, has delivered something and rings.

    Args:
        lie_down: Called by the leader before it sleeps; False keeps it from that.
        get_up: Called by the leader when it has slept, or not.
    """

    def __init__(
        self,
        lie_down: Callable[[], bool] = lambda: True,
        get_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._lie_down = lie_down
        self._get_up = get_up
        self._sockets = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.register(self._bell, select.EPOLLIN)
        self._changed = threading.Condition(threading.Lock())
        self._led = False
        self.waiting = 0
        """How many threads wait."""

    def watch(self, descriptor: int) -> None:
        """Local. Wake the leading thread when this descriptor becomes readable."""
        self._sockets.register(descriptor, select.EPOLLIN)

    def ignore(self, descriptor: int) -> None:
        """Local. Watch it no more; to be called before it is closed."""
        self._sockets.unregister(descriptor)

    def ring(self) -> None:
        """Local. Wake all threads that wait."""
        if self.waiting:
            with self._changed:
                if self._led:
                    os.eventfd_write(self._bell, 1)
                self._changed.notify_all()

    def wait(self, seconds: float, done: Callable[[], bool]) -> None:
        """Local. Sleep until something may have arrived, or somebody rings.

        Args:
            seconds: At most so long.
            done: Whether there is no need to sleep; whoever makes it true must ring.
        """
        with self._changed:
            self.waiting += 1
            leads, self._led = not self._led, True
        try:
            if not leads:
                with self._changed:
                    if not done():
                        self._changed.wait(seconds)
            elif not done() and self._lie_down():
                self._sockets.poll(seconds)
        finally:  # the handler of a signal may have raised
            self._rise(leads)

    def _rise(self, leads: bool) -> None:
        if leads:
            self._get_up()
        with self._changed:
            self.waiting -= 1
            if leads:
                self._led = False
                with suppress(BlockingIOError):  # nobody has rung
                    os.eventfd_read(self._bell)
                self._changed.notify()  # somebody else must lead

    def close(self) -> None:
        """Local. Give its descriptors back; nobody may wait. A second call does nothing."""
        if not self._sockets.closed:
            self._sockets.close()
            os.close(self._bell)
