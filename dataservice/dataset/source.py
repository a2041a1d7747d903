"""Sources whose elements are numbered."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from dataservice.dataset.context import Context, Splits
from dataservice.dataset.node import ElementIterator, Node


class IndexedSource(Node):
    """A source of elements 0, 1, ..., any of which can be had by its index."""

    @abstractmethod
    def element(self, index: int) -> Any:
        """Local. The element of an index below ``cardinality()``."""

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return IndexedIterator(self, splits_of(self, context))

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        return range(self.cardinality())

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return True


class Whole:
    """All indices of a source, as its only split."""

    def __init__(self, indices: range) -> None:
        self._indices = indices

    def split(self, number: int) -> range:
        """Local. See :class:`Splits`."""
        return self._indices if number == 0 else range(0)

    def mark(self, number: int) -> None:
        """Local. See :class:`Splits`."""


def splits_of(source: Node, context: Context) -> Splits:
    """Local. What a pass over a source shall evaluate of it."""
    if context.feed is None:
        return Whole(source.source_indices())
    return context.feed(context.passes)


class SplitReader:
    """Goes through splits, index by index.

    Args:
        splits: The splits.
    """

    def __init__(self, splits: Splits) -> None:
        self._splits = splits
        self._number = -1
        self._split = range(0)
        self._position = 0

    def next(self) -> int:
        """Local. The next index; StopIteration at the end."""
        while self._position == len(self._split):
            split = self._splits.split(self._number + 1)
            if not split:
                raise StopIteration
            # In this order for those who look at the place from other threads.
            self._split, self._position = split, 0
            self._number += 1
        self._position += 1
        return self._split[self._position - 1]

    def go_back(self) -> None:
        """Local. Have the index that was given last given again."""
        self._position -= 1

    @property
    def last(self) -> tuple[int, int]:
        """Number of the split that is being read, and where in it the index is given last."""
        return self._number, self._position - 1

    def get_state(self) -> tuple[int, int]:
        """Local. Where it is; the splits before that are needed no more."""
        self._splits.mark(max(self._number, 0))
        return self._number, self._position

    def set_state(self, state: tuple[int, int]) -> None:
        """Local. Go on from there."""
        self._number, self._position = state
        if self._number >= 0:
            self._split = self._splits.split(self._number)


class IndexedIterator(ElementIterator):
    """A pass over the elements of some splits, one split after the other."""

    def __init__(self, source: IndexedSource, splits: Splits) -> None:
        self._source = source
        self._indices = SplitReader(splits)

    def __next__(self) -> Any:
        return self._source.element(self._indices.next())

    def get_state(self) -> tuple[int, int]:
        """Local. See :class:`ElementIterator`."""
        return self._indices.get_state()

    def set_state(self, state: tuple[int, int]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._indices.set_state(state)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return True
