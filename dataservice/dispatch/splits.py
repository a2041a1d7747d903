"""Splits: ranges of source indices that the dispatcher assigns to workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dataservice.dataset.base import ENDLESS
from dataservice.proto import dataservice_pb2 as pb

# Splits are small enough to balance uneven workers at the end, and large enough to be rare.
_SPLITS_PER_WORKER = 4
_LARGEST = 4096
# An infinite source has no end at which smaller splits balance the workers.
_LARGEST_OF_ENDLESS = 256


def next_split(start: int, period: int, workers: int) -> range:
    """Return the next split of a source.

    Indices continue from pass to pass over the source: index ``k * period + i`` is index i of pass
    k. Workers notice the end of the last pass themselves. Splits shrink towards the end of a pass,
    so that all workers end at about the same time.

    Args:
        start: The first index that is not assigned.
        period: The number of indices of one pass.
        workers: The number of workers that share the indices.
    """
    if not period:
        return range(0)
    remaining = period - start % period
    largest = _LARGEST if remaining < ENDLESS >> 1 else _LARGEST_OF_ENDLESS
    size = min(max(remaining // (_SPLITS_PER_WORKER * max(workers, 1)), 1), largest)
    return range(start, start + size)


@dataclass(frozen=True)
class Granted:
    """The splits that are assigned to one part, in order.

    A position of the part always has the same index. So another worker of the part, or a worker
    that repeats a lost request, gets the same indices.

    Attributes:
        first: The position of the first index in ``splits``.
        splits: The splits from that position on.
    """

    first: int = 0
    splits: tuple[range, ...] = ()

    @property
    def stop(self) -> int:
        """The position behind the last assigned index."""
        return self.first + sum(map(len, self.splits))

    def at(self, position: int) -> range | None:
        """Return the indices of a split from a position on; None if no split has the position."""
        start = self.first
        for split in self.splits:
            if start <= position < start + len(split):
                return split[position - start :]
            start += len(split)
        return None

    def plus(self, split: range) -> Granted:
        """Return a copy with one more split."""
        return Granted(self.first, (*self.splits, split))

    def after(self, position: int) -> Granted:
        """Return a copy without the indices before a position."""
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
