"""A thread that watches queued work on a stream, for which the host does not wait.

A kernel of NCCL that waits for a missing rank would hang silently. Aborted work leaves wrong values
on the streams, and no caller can notice them, so the error ends the job.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from mpidist.config import config
from mpidist.errors import DistBackendError
from mpidist.gpu.cupy_api import cuda_errors, make_current
from mpidist.gpu.streams import is_done, logger
from mpidist.mpi import Backoff

_PERIOD_S = 0.1


class _Step:
    """A call on the host, or the work before an event, that may not end."""

    def __init__(self, text: str, event: Any, pending_op: Any = None) -> None:
        self.text = text
        self.event = event
        self.pending_op = pending_op
        self.since = time.monotonic()
        self.reported = False


class StreamWatchdog:
    """Watches queued work. The first call starts its thread.

    Args:
        where: The owner, for messages: ``"NCCL, rank 1 of 4, GPU 1"``.
        device: Index of the GPU.
        check: Raises an error that events do not show.
        abort: Ends the work under way, whatever its state.
        pending: The registry of pending operations of the rank, by key.
    """

    def __init__(
        self,
        where: str,
        device: int,
        check: Callable[[], None],
        abort: Callable[[], None],
        pending: MutableMapping[int, Any],
    ) -> None:
        self._pending = pending
        self._where = where
        self._device = device
        self._check_owner = check
        self._abort = abort
        self._call: _Step | None = None
        self._steps: deque[_Step] = deque()
        self._lock = threading.Lock()
        self._error: DistBackendError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def calling(self, text: str) -> Iterator[None]:
        """Watch a call that may block; one at a time.

        Args:
            text: The call, for messages.

        Raises:
            DistBackendError: Earlier work has failed or was aborted.
        """
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="mpidist-gpu-watchdog", daemon=True
            )
            self._thread.start()
        self._call = _Step(text, None)
        try:
            yield
        finally:
            self._call = None

    def append(self, text: str, event: Any, pending_op: Any) -> None:
        """Watch the work that was queued before an event.

        Args:
            text: The work, for messages.
            event: The event.
            pending_op: See :class:`mpidist.mpi.PendingOps`; registered until the event has come.
        """
        step = _Step(text, event, pending_op)
        with self._lock:
            self._remove_ended()
            self._steps.append(step)
            self._pending[id(step)] = pending_op

    def check(self) -> None:
        """Raise DistBackendError if any work has failed or was aborted."""
        if self._error is not None:
            raise DistBackendError(str(self._error)) from self._error

    def fail(self, error: Exception | str) -> DistBackendError:
        """Refuse all calls from now on. Return the error to raise."""
        if self._error is None:
            self._error = DistBackendError(f"{self._where}: {error}")
            if isinstance(error, Exception):
                self._error.__cause__ = error
        return self._error

    def pending(self) -> str | None:
        """Return the first work that has not ended, in words, or None."""
        with self._lock:
            self._remove_ended()
            return self._steps[0].text if self._steps else None

    def finish(self) -> None:
        """Wait until all work has ended. The thread aborts work that takes too long.

        Raises:
            DistBackendError: See :meth:`check`.
        """
        backoff = Backoff(spins=1000, longest_s=1e-4)
        while self.pending() is not None:
            self.check()
            backoff.pause()
        self.check()

    def stop(self) -> None:
        """End the thread. Work that has not ended is no longer watched."""
        self._stop.set()
        with self._lock:
            self._forget_steps()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _remove_ended(self) -> None:
        try:
            while self._steps and is_done(self._steps[0].event):
                self._pending.pop(id(self._steps.popleft()), None)
        except cuda_errors() as error:  # the caller's next call of CUDA raises it, too
            text = self._steps[0].text
            self._forget_steps()
            self.fail(f"{text}, or work that was queued before it, has failed: {error}")

    def _forget_steps(self) -> None:
        while self._steps:
            self._pending.pop(id(self._steps.popleft()), None)

    def _watch(self) -> None:
        make_current(self._device)
        while not self._stop.wait(_PERIOD_S):
            self.pending()
            if self._error is None:
                self._observe(time.monotonic())

    def _observe(self, now: float) -> None:
        try:
            self._check_owner()
        except Exception as error:
            self._end(f"it has failed: {error}")
        step = self._call or next(iter(self._steps.copy()), None)
        if step is None:
            return
        waited = now - step.since
        if waited > config.stall_s and not step.reported:
            step.reported = True
            logger.warning(
                "%s: %s has not ended after %.0f s; other ranks have not made the call, or work "
                "that was queued before it does not end",
                self._where,
                step.text,
                waited,
            )
        if waited > config.stall_abort_s:
            self._end(
                f"{step.text} has not ended after {waited:.0f} s, the limit set by "
                "MPIDIST_STALL_ABORT_S, and was aborted; later values on its streams are wrong"
            )

    def _end(self, reason: str) -> None:
        error = self.fail(reason)
        self._abort()
        with self._lock:
            self._forget_steps()
        raise error
