"""``Dataset.skip``: all but the first elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node, UnaryIterator, UnaryNode


@dataclass(frozen=True)
class Skip(UnaryNode):
    """Attributes: the node below, and how many elements to leave out; -1 leaves out all."""

    parent: Node
    count: int

    def __post_init__(self) -> None:
        if self.count < -1:
            raise ValueError(f"skip needs a count of at least 0, or -1 for all, not {self.count}")

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        if self.count == -1:
            return 0
        below = self.parent.cardinality()
        return below if below < 0 else max(below - self.count, 0)

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        return self._selected(slice(0) if self.count == -1 else slice(self.count, None))

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        parent = self.parent.iterate(context)
        # What feeds the source has selected by source_indices().
        return parent if context.feed else SkipIterator(parent, self.count)


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
