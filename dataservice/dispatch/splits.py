"""Handing out a source's indices in parts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataservice.proto import dataservice_pb2 as pb

# A split small enough to balance uneven workers at the end, large enough to be asked for rarely.
_SPLITS_PER_WORKER = 4
_LARGEST = 4096

Passes = tuple[int, ...]


class Cursors:
    """Gives each index of each pass to somebody exactly once.

    A pass is one reading of the whole source; a ``repeat`` before ``distribute`` reads it
    several times. Workers go through the passes in increasing order, each at its own speed.

    Args:
        length: Number of indices in a pass.
        cursors: Where to go on, as :meth:`state` gave it.
    """

    def __init__(self, length: int, cursors: list[pb.Cursor] | None = None) -> None:
        self._length = length
        self._next: dict[Passes, int] = {}
        self._last: Passes = ()
        for cursor in cursors or ():
            self._last = max(self._last, tuple(cursor.passes))
            if not cursor.over:
                self._next[tuple(cursor.passes)] = cursor.next

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
            self._next[passes] = 0
            self._last = passes
        if passes not in self._next:
            # Everyone who has reached a later pass was told that this one had ended.
            return range(0)
        start = self._next[passes]
        remaining = self._length - start
        size = min(max(remaining // (_SPLITS_PER_WORKER * max(workers, 1)), 1), _LARGEST)
        stop = min(start + size, self._length)
        if stop == self._length:
            del self._next[passes]
        else:
            self._next[passes] = stop
        return range(start, stop)

    def state(self) -> list[pb.Cursor]:
        """Local. Where it is: the passes that are not over, and the last one."""
        cursors = [pb.Cursor(passes=passes, next=start) for passes, start in self._next.items()]
        if self._last and self._last not in self._next:
            cursors.append(pb.Cursor(passes=self._last, over=True))
        return cursors


@dataclass
class Granted:
    """The splits that one part has been given, by pass and number.

    A split that is asked for again, by another worker or because an answer was lost, is the same.

    Attributes:
        passes: For each pass, the number of the first split that is kept, and the splits.
    """

    passes: dict[Passes, tuple[int, list[range]]] = field(default_factory=dict)

    def get(self, passes: Passes, number: int) -> range | None:
        """Local. A split that has been given; None if it has not."""
        first, splits = self.passes.get(passes, (0, []))
        if not first <= number < first + len(splits):
            return None
        return splits[number - first]

    def add(self, passes: Passes, split: range) -> None:
        """Local. Take note of the next split of a pass."""
        self.passes.setdefault(passes, (0, []))[1].append(split)

    def count(self, passes: Passes) -> int:
        """Local. How many splits of a pass there have been."""
        first, splits = self.passes.get(passes, (0, []))
        return first + len(splits)

    def after(self, passes: Passes, number: int) -> Granted:
        """Local. Without the earlier passes, and the splits of that pass before a number."""
        kept = {key: value for key, value in self.passes.items() if key >= passes}
        if passes in kept:
            first, splits = kept[passes]
            kept[passes] = (max(number, first), splits[max(number - first, 0) :])
        return Granted(kept)

    def state(self) -> list[pb.Splits]:
        """Local. As messages."""
        return [
            pb.Splits(
                passes=passes, first=first, bounds=[b for s in splits for b in (s.start, s.stop)]
            )
            for passes, (first, splits) in self.passes.items()
        ]

    @classmethod
    def of(cls, state: list[pb.Splits]) -> Granted:
        """Local. The inverse of :meth:`state`."""
        passes = {}
        for splits in state:
            numbers = iter(splits.bounds)
            ranges = [range(start, stop) for start, stop in zip(numbers, numbers, strict=True)]
            passes[tuple(splits.passes)] = (splits.first, ranges)
        return cls(passes)
