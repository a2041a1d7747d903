"""What a way has queued on devices and not yet seen end, with a thread that looks after it.

The host does not wait for such work: a kernel that waits for a rank that never comes would hang
without a word. Work that is given up ends with wrong values on the streams, which nobody there can
tell: so the thread's error ends the job.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpidist.config import config
from mpidist.cuda.library import errors_of_cuda, make_current
from mpidist.cuda.streams import has_come, logger
from mpidist.errors import DistBackendError
from mpidist.runtime import Backoff

_PERIOD_S = 0.1


class _Step:
    """Something that may not end: a call of the host, or what is before an event."""

    def __init__(self, doing: str, event: Any) -> None:
        self.doing = doing
        self.event = event
        self.since = time.monotonic()
        self.told = False


class Tail:
    """Local. Looks after what is queued; the first call starts its thread.

    Args:
        where: Whose it is, for messages: ``"NCCL, rank 1 of 4, GPU 1"``.
        number: Of the device.
        look: Raises if something has failed that events do not show.
        give_up: Ends what is under way, whatever its state.
    """

    def __init__(
        self, where: str, number: int, look: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        self._where = where
        self._number = number
        self._look = look
        self._give_up = give_up
        self._call: _Step | None = None
        self._steps: deque[_Step] = deque()
        self._lock = threading.Lock()
        self._error: DistBackendError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def calling(self, doing: str) -> Iterator[None]:
        """Local. Look after a call that may block; one at a time.

        Raises:
            DistBackendError: Something before it has failed or was given up.
        """
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="mpidist-gpu-watchdog", daemon=True
            )
            self._thread.start()
        self._call = _Step(doing, None)
        try:
            yield
        finally:
            self._call = None

    def append(self, doing: str, event: Any) -> None:
        """Local. Look after what is queued before an event."""
        step = _Step(doing, event)
        with self._lock:
            self._forget()
            self._steps.append(step)

    def check(self) -> None:
        """Local. DistBackendError if anything has failed or was given up."""
        if self._error is not None:
            raise DistBackendError(str(self._error)) from self._error

    def fail(self, error: Exception | str) -> DistBackendError:
        """Local. Refuse all calls from now on; returns the error to raise."""
        if self._error is None:
            self._error = DistBackendError(f"{self._where}: {error}")
            if isinstance(error, Exception):
                self._error.__cause__ = error
        return self._error

    def pending(self) -> str | None:
        """Local. The first of what has not ended, in words; None if all has."""
        with self._lock:
            self._forget()
            return self._steps[0].doing if self._steps else None

    def finish(self) -> None:
        """Local. Wait until all has ended; what takes too long is given up by the thread.

        Raises:
            DistBackendError: See :meth:`check`.
        """
        backoff = Backoff(spins=1000, longest_s=1e-4)
        while self.pending() is not None:
            self.check()
            backoff.pause()
        self.check()

    def stop(self) -> None:
        """Local. End the thread."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _forget(self) -> None:
        try:
            while self._steps and has_come(self._steps[0].event):
                self._steps.popleft()
        except errors_of_cuda() as error:  # the user's next call of CUDA tells it, too
            doing = self._steps[0].doing
            self._steps.clear()
            self.fail(f"{doing}, or what was queued before it, has failed: {error}")

    def _watch(self) -> None:
        make_current(self._number)
        while not self._stop.wait(_PERIOD_S):
            self.pending()
            if self._error is None:
                self._observe(time.monotonic())

    def _observe(self, now: float) -> None:
        try:
            self._look()
        except Exception as error:
            self._end(f"it has failed: {error}")
        step = self._call or next(iter(self._steps.copy()), None)
        if step is None:
            return
        waited = now - step.since
        if waited > config.stall_s and not step.told:
            step.told = True
            logger.warning(
                "%s: %s has not ended after %.0f s; other ranks have not made the call, or what "
                "was queued before it does not end",
                self._where,
                step.doing,
                waited,
            )
        if waited > config.stall_abort_s:
            self._end(
                f"{step.doing} has not ended after {waited:.0f} s, the limit set by "
                "MPIDIST_STALL_ABORT_S, and was given up; what depends on it has wrong values"
            )

    def _end(self, reason: str) -> None:
        error = self.fail(reason)
        self._give_up()
        raise error
