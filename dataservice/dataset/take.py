"""``Dataset.take``: the first elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    ElementIterator,
    Node,
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

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        below = self.parent.cardinality()
        if self.count == -1 or self.count == 0:
            return below if self.count else 0
        if below == INFINITE_CARDINALITY:
            return self.count
        return below if below < 0 else min(below, self.count)

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        if self.count == -1:
            return self.parent.source_indices()
        return self._selected(slice(self.count))

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        parent = self.parent.iterate(context)
        # What feeds the source has selected by source_indices().
        return parent if context.feed or self.count == -1 else TakeIterator(parent, self.count)


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
