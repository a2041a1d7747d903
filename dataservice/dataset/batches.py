"""What the nodes that make batches have in common."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    ElementIterator,
    Node,
    Place,
    Reader,
    UnaryIterator,
    UnaryNode,
)
from mpidist.errors import InvalidArgumentError


class Stack(Protocol):
    """The elements of one batch, as they come."""

    def append(self, element: Any) -> None:
        """Local. Add an element; InvalidArgumentError if it does not go with those before."""

    def result(self) -> Any:
        """Local. The batch of at least one element."""


class BatchNode(UnaryNode):
    """Makes batches of ``batch_size`` elements; the last one may be smaller, or is left out.

    Over an indexed node, batches are indexed, too: workers take them as a whole, and they are the
    same whoever makes them.
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

    def indexed_length(self) -> int | None:
        """Return the number of batches; see :class:`Node`."""
        below = self.parent.indexed_length()
        return None if below is None else self._count(below)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _BatchReader(self, places, context)

    def _iterate(self, context: Context) -> ElementIterator:
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


class _BatchReader(Reader):
    """Batches by their numbers. An element that fails is the error of its batch alone."""

    def __init__(self, node: BatchNode, places: Iterator[Place], context: Context) -> None:
        self._node = node
        # The node below may take places ahead, on another thread.
        self._sizes: deque[int] = deque()
        length = node.parent.indexed_length()
        assert length is not None
        below = _places_of(places, node.batch_size, length, self._sizes)
        self._parent = node.parent.read(below, context)

    def __next__(self) -> Any:
        stack, size, taken = self._node.stack(), 1, 0
        failed: Exception | None = None
        while taken < size:
            try:
                element = next(self._parent)
                if failed is None:
                    stack.append(element)
            except StopIteration:
                raise
            except Exception as error:  # the next batch begins where it would have begun
                failed = failed or error
            if not taken:
                size = self._sizes.popleft()
            taken += 1
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback refers to this frame
        return stack.result()

    def close(self) -> None:
        self._parent.close()


def _places_of(
    places: Iterator[Place], batch_size: int, length: int, sizes: deque[int]
) -> Iterator[Place]:
    """Yield the places of the elements of batches. Append the size of each batch to a queue."""
    for epoch, batch in places:
        indices = range(batch * batch_size, min((batch + 1) * batch_size, length))
        sizes.append(len(indices))
        for index in indices:
            yield epoch, index
