"""Cooperative yields of a thread that copies or writes a checkpoint."""

from __future__ import annotations

import os
import time

CHUNK_BYTES = 512 << 10
"""Bytes to copy or to write between two calls of :meth:`CoreSharing.yield_if_due`.

A chunk takes 0.2 ms. Writes of 256 KiB made a save of 64 MiB 10 % longer. With chunks of 1 MiB, a
push under Open MPI waited 2 ms longer.
"""
_MIN_SLICE_S = 5e-5  # a yield for each small array would take up to 30 s for 15,000 of them


class CoreSharing:
    """The share of a core that a checkpoint thread takes from threads that train.

    A thread that polls for messages yields its core between polls. Without yields, a checkpoint
    thread on the same core would then run until the next tick of the kernel, up to 4 ms. After each
    yield the checkpoint thread works at least half as long as the other threads have used the core.
    So it keeps a third of the core beside threads that compute.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()  # start of the work after the last yield
        self._slice_s = _MIN_SLICE_S

    def yield_if_due(self) -> None:
        """Yield the core if this thread has worked long enough since the last yield."""
        now = time.perf_counter()
        if now - self._since >= self._slice_s:
            os.sched_yield()
            self._since = time.perf_counter()
            self._slice_s = max(_MIN_SLICE_S, (self._since - now) / 2)
