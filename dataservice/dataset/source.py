"""Sources whose elements are numbered."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from dataservice.dataset.node import Context, ElementIterator, Node
from mpidist.errors import UnimplementedError


class IndexedSource(Node):
    """A source of elements 0, 1, ..., any of which can be had by its index."""

    @abstractmethod
    def element(self, index: int) -> Any:
        """Local. The element of an index below ``cardinality()``."""

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        if context.feed is None:
            return IndexedIterator(self, iter([self.source_indices()]))
        return FedIterator(self, context.feed(context.passes))

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        return range(self.cardinality())

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return True


class IndexedIterator(ElementIterator):
    """A pass over the elements of some index ranges, one range after the other."""

    def __init__(self, source: IndexedSource, ranges: Iterator[range]) -> None:
        self._source = source
        self._ranges = ranges
        self._range = range(0)
        self._position = 0

    def __next__(self) -> Any:
        while self._position == len(self._range):
            self._range = next(self._ranges)
            self._position = 0
        index = self._range[self._position]
        self._position += 1
        return self._source.element(index)

    def get_state(self) -> int:
        """Local. See :class:`ElementIterator`: how many elements have been given."""
        return self._position

    def set_state(self, state: int) -> None:
        """Local. See :class:`ElementIterator`."""
        self._range = next(self._ranges)
        self._position = state

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""


class FedIterator(IndexedIterator):
    """A pass over ranges that are asked for one by one, while others go to other processes."""

    def get_state(self) -> int:
        """Local. UnimplementedError: whoever deals the ranges out knows."""
        raise UnimplementedError(f"{self._source.summary()} is dealt out to several workers")

    def set_state(self, state: int) -> None:
        """Local. UnimplementedError."""
        self.get_state()
