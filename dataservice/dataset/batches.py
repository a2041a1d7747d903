"""What the nodes that make batches have in common."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

from dataservice.dataset.context import Context, Feed, Splits
from dataservice.dataset.failure import FeedFailed
from dataservice.dataset.node import ElementIterator, Node, UnaryIterator, UnaryNode
from dataservice.dataset.runs import AT_ONCE, SplitUnaryIterator
from mpidist.errors import InvalidArgumentError


class Stack(Protocol):
    """The elements of one batch, as they come."""

    def append(self, element: Any) -> None:
        """Local. Add an element; InvalidArgumentError if it does not go with those before."""

    def result(self) -> Any:
        """Local. The batch of at least one element."""


class BatchNode(UnaryNode):
    """Makes batches of ``batch_size`` elements; the last one may be smaller, or is left out.

    Over a node whose element i is that of source index i, batches have indices of their own: they
    are dealt out whole, and are the same whoever makes them.
    """

    parent: Node
    batch_size: int
    drop_remainder: bool

    @abstractmethod
    def stack(self) -> Stack:
        """Local. Something that takes the elements of a batch."""

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        return count if count < 0 else self._count(count)

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    def source_indices(self) -> range:
        """Local. See :class:`Node`; the numbers of the batches, where elements have such."""
        below = self.parent.source_indices()
        return range(self._count(len(below))) if self.parent.one_to_one else below

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        if context.feed is not None and self.parent.one_to_one:
            return SplitBatchIterator(self, context, context.feed)
        return BatchIterator(self, self.parent.iterate(context))

    def _count(self, elements: int) -> int:
        return (
            elements // self.batch_size if self.drop_remainder else -(-elements // self.batch_size)
        )


class BatchIterator(UnaryIterator):
    """One pass; holds nothing between two batches."""

    def __init__(self, node: BatchNode, parent: ElementIterator) -> None:
        super().__init__(parent)
        self._node = node

    def __next__(self) -> Any:
        node = self._node
        stack, count = node.stack(), 0
        elements = itertools.islice(self._parent, node.batch_size)
        for element in elements:
            try:
                stack.append(element)
            except InvalidArgumentError:
                # The next batch begins where it would have begun.
                count += 1 + sum(1 for _ in elements)
                if count < node.batch_size and node.drop_remainder:
                    raise StopIteration from None  # it would be left out
                raise
            count += 1
        if not count or (count < node.batch_size and node.drop_remainder):
            raise StopIteration
        return stack.result()


class SplitBatchIterator(SplitUnaryIterator):
    """A pass over the batches of some splits.

    Args:
        node: The batches.
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(self, node: BatchNode, context: Context, feed: Feed) -> None:
        super().__init__(node.parent, context, feed)
        self._node = node

    def _element(self, batch: int) -> Any:
        size = self._node.batch_size
        stack = self._node.stack()
        failed: Exception | None = None
        for _ in range(min(size, len(self._below) - batch * size)):
            try:
                element = self._next_below()
                if failed is None:
                    stack.append(element)
            except (StopIteration, FeedFailed):
                raise
            except Exception as error:  # the next batch begins where it would have begun
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback refers to this frame
        return stack.result()

    def _runs(self, number: int, position: int) -> Iterator[range]:
        return _elements_of(self._splits, number, position, self._node.batch_size, self._below)


def _elements_of(
    splits: Splits, number: int, position: int, size: int, below: range
) -> Iterator[range]:
    """The indices of the elements of batches, from a place among the splits on."""
    while split := splits.split(number):
        batches = split[position:]
        at_once = max(AT_ONCE // size, 1) if batches.step == 1 else 1
        for start in range(0, len(batches), at_once):
            some = batches[start : start + at_once]
            yield below[some[0] * size : (some[-1] + 1) * size]
        number, position = number + 1, 0
