"""``Dataset.skip``: all but the first elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node, Place, UnaryIterator, UnaryNode


@dataclass(frozen=True)
class Skip(UnaryNode):
    """Attributes: the node below, and how many elements to leave out; -1 leaves out all."""

    parent: Node
    count: int

    def __post_init__(self) -> None:
        if self.count < -1:
            raise ValueError(f"skip needs a count of at least 0, or -1 for all, not {self.count}")

    def indexed_length(self) -> int | None:
        """Return the number of elements behind the count; see :class:`Node`."""
        below = self.parent.indexed_length()
        if below is None or self.count == -1:
            return None if below is None else 0
        return max(below - self.count, 0)

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        if self.count == -1:
            return 0
        below = self.parent.cardinality()
        return below if below < 0 else max(below - self.count, 0)

    def source_length(self) -> int:
        """Return the number of elements; see :class:`Node`."""
        return self.indexed_only()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        count = self.count
        return self.parent.read(((epoch, index + count) for epoch, index in places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return SkipIterator(self.parent.iterate(context), self.count)


class SkipIterator(UnaryIterator):
    """One pass."""

    def __init__(self, parent: ElementIterator, count: int) -> None:
        super().__init__(parent)
        self._left = count

    def __next__(self) -> Any:
        if self._left == -1:
            raise StopIteration
        while self._left:
            next(self._parent)
            self._left -= 1
        return next(self._parent)

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._left, super().get_state()

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._left, below = state
        super().set_state(below)
