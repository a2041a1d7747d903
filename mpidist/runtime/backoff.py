"""How to wait by polling without burning a core."""

from __future__ import annotations

import os
import time


class Backoff:
    """Local. Pauses between polls: first a yield of the core, then sleeps that grow.

    Yielding keeps the latency near that of spinning while ranks share cores; sleeping keeps an
    idle loop from taking a core of its own. Up to a third of a millisecond sleeps double; after
    that they grow slowly, so that only what has been idle for long is late by more.

    Args:
        spins: How many pauses only yield before sleeping begins.
        longest_s: The longest sleep, in seconds.
    """

    __slots__ = ("_count", "_longest_s", "_sleep_s", "_spins")

    _FIRST_S = 20e-6
    _QUICK_S = 3e-4

    def __init__(self, spins: int = 200, longest_s: float = 1e-3) -> None:
        self._spins = spins
        self._longest_s = longest_s
        self.reset()

    def reset(self) -> None:
        """Local. Start again with yields: something happened."""
        self._count = 0
        self._sleep_s = self._FIRST_S

    def next_sleep(self) -> float:
        """Local. Seconds that the next pause sleeps; 0 means that it only yields."""
        if self._count < self._spins:
            self._count += 1
            return 0.0
        sleep_s = self._sleep_s
        factor = 2.0 if sleep_s < self._QUICK_S else 1.01
        self._sleep_s = min(factor * sleep_s, self._longest_s)
        return sleep_s

    def pause(self) -> None:
        """Local. Yield or sleep once."""
        sleep_s = self.next_sleep()
        if sleep_s:
            time.sleep(sleep_s)
        else:
            os.sched_yield()
