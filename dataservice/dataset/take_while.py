"""``Dataset.take_while``: the elements before the first that a function does not want."""

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
class TakeWhile(UnaryNode):
    """Attributes: the node below, and what says whether to go on with an element."""

    parent: Node
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        """Raise UnimplementedError; see :class:`Node`."""
        raise self.cannot_be_split("each would stop somewhere in its own part")

    def _iterate(self, context: Context) -> ElementIterator:
        return TakeWhileIterator(self.parent.iterate(context), self.predicate)


class TakeWhileIterator(UnaryIterator):
    """One pass."""

    def __init__(self, parent: ElementIterator, predicate: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._predicate = predicate
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        element = next(self._parent)
        if holds(self._predicate, element, "take_while"):
            return element
        self._ended = True
        raise StopIteration

    def get_state(self) -> tuple[bool, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._ended, super().get_state()

    def set_state(self, state: tuple[bool, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._ended, below = state
        super().set_state(below)
