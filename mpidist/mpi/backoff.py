"""Pauses between polls that leave the core to other threads."""

from __future__ import annotations

import os
import time


class Backoff:
    """Exponential backoff: the first pauses yield the core, later ones sleep longer and longer.

    A yield keeps the latency near that of spinning while ranks share cores. Sleeps keep an idle
    loop from taking a core. They double up to a third of a millisecond. After that they grow
    slowly, so only a loop that has been idle for long reacts later.

    Args:
        spins: Number of pauses that yield before the first sleep.
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
        """Start again with yields, after an event."""
        self._count = 0
        self._sleep_s = self._FIRST_S

    def next_sleep(self) -> float:
        """Return the seconds that the next pause sleeps; 0 for a yield."""
        if self._count < self._spins:
            self._count += 1
            return 0.0
        sleep_s = self._sleep_s
        factor = 2.0 if sleep_s < self._QUICK_S else 1.01
        self._sleep_s = min(factor * sleep_s, self._longest_s)
        return sleep_s

    def pause(self) -> None:
        """Yield or sleep once."""
        sleep_s = self.next_sleep()
        if sleep_s:
            time.sleep(sleep_s)
        else:
            os.sched_yield()


class SharedCoreBackoff(Backoff):
    """Backoff of a rank that shares its core with other ranks: yields for 2 ms, then short sleeps.

    A rank that only yields takes time from the ranks that compute. On two busy cores, a step of
    DistributedDataParallel on four ranks took 13 to 30 % longer with yields alone. With yields for
    less than 1 ms, a small ``all_reduce`` took two to five times as long.
    """

    __slots__ = ("_until",)

    _YIELD_S = 2e-3
    _SLEEP_S = 1e-4

    def reset(self) -> None:
        """Start again with yields, after an event."""
        super().reset()
        self._until = time.monotonic() + self._YIELD_S

    def next_sleep(self) -> float:
        """Return the seconds that the next pause sleeps; 0 for a yield."""
        return 0.0 if time.monotonic() < self._until else self._SLEEP_S
