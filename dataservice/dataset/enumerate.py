"""``Dataset.enumerate``: elements with their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node, UnaryIterator, UnaryNode
from dataservice.dataset.range import Range
from dataservice.dataset.spec import ArraySpec, Spec
from dataservice.dataset.zip import Zip


@dataclass(frozen=True)
class Enumerate(UnaryNode):
    """Attributes: the node below, and the first number."""

    parent: Node
    start: int

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        below = self.parent.source_indices()
        if not self.parent.one_to_one:
            raise self.cannot_be_split("every worker would count its own elements")
        return range(len(below))

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return ArraySpec((), np.int64), self.parent.element_spec()

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        if context.feed is not None:
            numbers = Range(self.start, self.start + self.parent.cardinality(), 1)
            return Zip((numbers, self.parent), (0, 0)).iterate(context)
        return EnumerateIterator(self.parent.iterate(context), self.start)


class EnumerateIterator(UnaryIterator):
    """One pass."""

    def __init__(self, parent: ElementIterator, start: int) -> None:
        super().__init__(parent)
        self._number = start

    def __next__(self) -> tuple[np.int64, Any]:
        self._number += 1  # also where the element fails, which had its number
        return np.int64(self._number - 1), next(self._parent)

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._number, super().get_state()

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._number, below = state
        super().set_state(below)
