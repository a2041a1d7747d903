"""``Dataset.map``: a function of each element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.functions import call
from dataservice.dataset.node import ElementIterator, Node, UnaryIterator, UnaryNode
from dataservice.dataset.spec import Spec, spec_of


@dataclass(frozen=True)
class Map(UnaryNode):
    """Attributes: the node below, and the function; it gets a tuple's members as arguments."""

    parent: Node
    function: Callable[..., Any]

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return spec_of(self.first())

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return MapIterator(self.parent.iterate(context), self.function)


class MapIterator(UnaryIterator):
    """One pass; has no state of its own."""

    def __init__(self, parent: ElementIterator, function: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._function = function

    def __next__(self) -> Any:
        return tree.to_numpy(call(self._function, next(self._parent), "map"))
