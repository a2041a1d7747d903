"""Giving out the indices of a source in splits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.dataset.base import ENDLESS
from dataservice.proto import dataservice_pb2 as pb

# A split small enough to balance uneven workers at the end, large enough to be asked for rarely.
_SPLITS_PER_WORKER = 4
_LARGEST = 4096
# No end balances the workers of an endless source.
_LARGEST_OF_ENDLESS = 256


def next_split(start: int, period: int, workers: int) -> range:
    """Return the next split of a source.

    Indices go on from pass to pass over the source: index ``k * period + i`` is index i of pass k.
    Workers find out by themselves that there is no further pass. Splits shrink towards the end of a
    pass, so that all workers end at about the same time.

    Args:
        start: First index that nobody has been given.
        period: Number of indices of one pass.
        workers: How many workers share them.
    """
    if not period:
        return range(0)
    remaining = period - start % period
    largest = _LARGEST if remaining < ENDLESS >> 1 else _LARGEST_OF_ENDLESS
    size = min(max(remaining // (_SPLITS_PER_WORKER * max(workers, 1)), 1), largest)
    return range(start, start + size)


@dataclass(frozen=True)
class Granted:
    """The splits that one part has been given, in order.

    A position that is asked for again, by another worker or because an answer was lost, has the
    same index.

    Attributes:
        first: Position of the first index that is kept.
        splits: The splits from there on.
    """

    first: int = 0
    splits: tuple[range, ...] = ()

    @property
    def stop(self) -> int:
        """Position of the first index that has not been given."""
        return self.first + sum(map(len, self.splits))

    def at(self, position: int) -> range | None:
        """Return the indices of a split from a position on; None if they are not here."""
        start = self.first
        for split in self.splits:
            if start <= position < start + len(split):
                return split[position - start :]
            start += len(split)
        return None

    def plus(self, split: range) -> Granted:
        """Return the same with one more split."""
        return Granted(self.first, (*self.splits, split))

    def after(self, position: int) -> Granted:
        """Return the same without what is before a position."""
        first, splits = self.first, list(self.splits)
        while splits and first + len(splits[0]) <= position:
            first += len(splits.pop(0))
        if splits and position > first:
            splits[0] = splits[0][position - first :]
            first = position
        return Granted(first, tuple(splits))

    def state(self) -> pb.Splits:
        """Return the splits as a message."""
        bounds = [bound for split in self.splits for bound in (split.start, split.stop)]
        return pb.Splits(first=self.first, bounds=bounds)

    @classmethod
    def of(cls, state: pb.Splits) -> Granted:
        """Return the splits of a message."""
        numbers = iter(state.bounds)
        splits = tuple(range(start, stop) for start, stop in zip(numbers, numbers, strict=True))
        return cls(state.first, splits)
