"""A thread that calls something again and again, while it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Reminder:
    """Local. Calls something every few milliseconds, from :meth:`start` to :meth:`stop`.

    Args:
        call: What; it has :meth:`done` called, soon or later. It must not raise.
        period_s: How often, in seconds.
    """

    def __init__(self, call: Callable[[], None], period_s: float) -> None:
        self._call = call
        self._period_s = period_s
        self._wanted = threading.Event()
        self._done = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Local. Begin to call."""
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ps-reminder", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Local. Call no more, until :meth:`start`."""
        self._wanted.clear()

    def done(self) -> None:
        """Local. What was called for has been done: so calls never pile up."""
        self._done.set()

    def close(self) -> None:
        """Local. End the thread."""
        self._closed.set()
        self._wanted.set()
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            self._wanted.wait()
            self._done.clear()
            if not self._closed.is_set():
                self._call()
                self._done.wait()
