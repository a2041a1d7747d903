"""Sets of whole numbers, as ranges. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class RangeSet:
    """A set of numbers that mostly come in runs; it takes memory for each run.

    Args:
        bounds: start, stop, start, stop, ... of runs, in any order, overlapping or not.
    """

    def __init__(self, bounds: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        numbers = iter(bounds)
        for start, stop in zip(numbers, numbers, strict=True):
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from ``start`` to ``stop``, exclusive."""
        if start >= stop:
            return
        # The runs that it touches become one with it.
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def update(self, other: RangeSet) -> None:
        """Add all numbers of another set."""
        for start, stop in other.runs():
            self.add(start, stop)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Return start and stop of every run, in order."""
        return zip(self._starts, self._stops, strict=True)

    @property
    def bounds(self) -> list[int]:
        """The start, stop, start, stop, ... of the runs in order, as for the constructor."""
        return [bound for run in self.runs() for bound in run]

    @property
    def prefix(self) -> int:
        """The smallest number from 0 on that is not in the set."""
        return self._stops[0] if self._starts and self._starts[0] <= 0 else 0

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __contains__(self, number: int) -> bool:
        run = bisect_right(self._starts, number) - 1
        return run >= 0 and number < self._stops[run]

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and self.bounds == other.bounds

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"RangeSet({self.bounds})"
