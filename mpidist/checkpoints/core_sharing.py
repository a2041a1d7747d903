"""How a thread that copies or writes a checkpoint shares its core with the training."""

from __future__ import annotations

import os
import time

PIECE_BYTES = 512 << 10
"""Bytes to copy or to write between two calls of :meth:`CoreSharing.share`."""
_SHORTEST_S = 5e-5


class CoreSharing:
    """Yields the core of this thread from time to time.

    A thread that waits for messages yields its core again and again. If it has the same core as
    this thread, it would get it back only at the end of a time slice of the kernel, after 4 ms.
    After each yield this thread works at least half as long as others have used the core, so beside
    threads that compute it keeps a third of the core.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()  # begin of the work after the last yield
        self._turn_s = _SHORTEST_S

    def share(self) -> None:
        """Yield the core if this thread has worked long enough since the last yield."""
        now = time.perf_counter()
        if now - self._since >= self._turn_s:
            os.sched_yield()
            self._since = time.perf_counter()
            self._turn_s = max(_SHORTEST_S, (self._since - now) / 2)
