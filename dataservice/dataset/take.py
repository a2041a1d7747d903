"""``Dataset.take``: the first elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    ElementIterator,
    Node,
    Place,
    UnaryIterator,
    UnaryNode,
)


@dataclass(frozen=True)
class Take(UnaryNode):
    """Attributes: the node below, and how many elements; -1 takes all."""

    parent: Node
    count: int

    def __post_init__(self) -> None:
        if self.count < -1:
            raise ValueError(f"take needs a count of at least 0, or -1 for all, not {self.count}")

    def indexed_length(self) -> int | None:
        """Return the number of elements, at most the count; see :class:`Node`."""
        below = self.parent.indexed_length()
        return below if below is None or self.count == -1 else min(below, self.count)

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        below = self.parent.cardinality()
        if self.count == -1 or self.count == 0:
            return below if self.count else 0
        if below == INFINITE_CARDINALITY:
            return self.count
        return below if below < 0 else min(below, self.count)

    def source_length(self) -> int:
        """Return the number of elements; see :class:`Node`."""
        return self.parent.source_length() if self.count == -1 else self.indexed_only()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return self.parent.read(places, context)

    def _iterate(self, context: Context) -> ElementIterator:
        parent = self.parent.iterate(context)
        return parent if self.count == -1 else TakeIterator(parent, self.count)


class TakeIterator(UnaryIterator):
    """One pass."""

    def __init__(self, parent: ElementIterator, count: int) -> None:
        super().__init__(parent)
        self._left = count

    def __next__(self) -> Any:
        if not self._left:
            raise StopIteration
        element = next(self._parent)
        self._left -= 1
        return element

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._left, super().get_state()

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._left, below = state
        super().set_state(below)
