"""``Dataset.filter``: the elements that a function wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.answers import holds
from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)


@dataclass(frozen=True)
class Filter(UnaryNode):
    """Attributes: the node below, and what says whether an element stays."""

    parent: Node
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def _iterate(self, context: Context) -> ElementIterator:
        return FilterIterator(self.parent.iterate(context), self.predicate)


class FilterIterator(UnaryIterator):
    """One pass; has no state of its own."""

    def __init__(self, parent: ElementIterator, predicate: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._predicate = predicate

    def __next__(self) -> Any:
        while True:
            element = next(self._parent)
            if holds(self._predicate, element, "filter"):
                return element
