"""Passes over source indices that the node above chooses, as it goes through splits.

A pass may read ahead on threads of its own, as below ``prefetch``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from dataservice.dataset.node import Passes, Splits

AT_ONCE = 4096
"""How many indices are chosen at once, at most."""


class Remembered:
    """Splits that two read, one of them ahead of the other; each is asked for once.

    Args:
        splits: The splits.
    """

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._known: dict[int, range] = {}

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        if number not in self._known:
            self._known[number] = self._splits.split(number)
        return self._known[number]

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`; what comes before is forgotten."""
        for known in list(self._known):
            if known < number:
                self._known.pop(known, None)
        self._splits.mark(number)


class Runs:
    """Runs of indices, as the splits of a pass whose state nobody takes.

    Args:
        runs: Not empty; gone through as the pass asks.

    Attributes:
        coming: The indices that the pass has been given, and whose elements it has not given.
    """

    def __init__(self, runs: Iterator[range]) -> None:
        self._source = runs
        self._runs: list[range] = []
        self._lock = threading.Lock()
        self.coming: deque[int] = deque()

    def feed(self, passes: Passes) -> Splits:
        """Local. Gives these splits."""
        return self

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        with self._lock:
            while number >= len(self._runs):
                run = next(self._source, range(0))
                if not run:
                    return run
                self._runs.append(run)
                self.coming.extend(run)
            return self._runs[number]

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`."""
