"""A thread that writes checkpoints while the training goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue


class WritingThread:
    """Runs one function at a time in a daemon thread, which starts with the first one.

    The thread is kept: to start one takes 2 ms while other processes use the cores. An executor of
    ``concurrent.futures`` would refuse checkpoints after the end of the script, from other threads
    and from exit handlers, and would delay the end of a process that has failed.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._done.set()
        self._error: BaseException | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Run a function in the thread. The one before has ended."""
        if not self._is_running():
            self._calls = SimpleQueue()
            self._thread = threading.Thread(
                target=self._run, args=(self._calls,), name="mpidist-checkpoint", daemon=True
            )
            self._thread.start()
        self._done.clear()
        self._calls.put(call)

    def wait(self) -> None:
        """Wait until the function has ended. Raise its error once."""
        if self._is_running():
            self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread after the function."""
        self._calls.put(None)

    def _is_running(self) -> bool:
        """Return whether the thread is there. A forked child has none."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, calls: SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                self._error = error
                # The hook of mpidist, or of mpidist run, ends the job at once.
                threading.excepthook(
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            del call  # it refers to arrays
            self._done.set()
