"""Handing out a source's indices in parts. Pure."""

from __future__ import annotations

# A split small enough to balance uneven workers at the end, large enough to be asked for rarely.
_SPLITS_PER_WORKER = 4
_LARGEST = 4096

Passes = tuple[int, ...]


class Splits:
    """Gives each index of each pass to somebody exactly once.

    A pass is one reading of the whole source; a ``repeat`` before ``distribute`` reads it
    several times. Workers go through the passes in increasing order, each at its own speed.

    Args:
        length: Number of indices in a pass.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._cursors: dict[Passes, int] = {}
        self._last: Passes = ()

    def next(self, passes: Passes, workers: int) -> range:
        """Local. The next part of a pass.

        Parts shrink towards the end of the pass, so that all workers end at about the same time.

        Args:
            passes: Which pass: the numbers of the repetitions around it, outermost first.
            workers: How many share it.

        Returns:
            Indices; empty if the pass has been given out.
        """
        if passes > self._last:
            self._cursors[passes] = 0
            self._last = passes
        if passes not in self._cursors:
            # Everyone who has reached a later pass was told that this one had ended.
            return range(0)
        start = self._cursors[passes]
        remaining = self._length - start
        size = min(max(remaining // (_SPLITS_PER_WORKER * max(workers, 1)), 1), _LARGEST)
        stop = min(start + size, self._length)
        if stop == self._length:
            del self._cursors[passes]
        else:
            self._cursors[passes] = stop
        return range(start, stop)
