"""``Dataset.map``: a function of each element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.node import Context, ElementIterator, Node, UnaryIterator, UnaryNode


@dataclass(frozen=True)
class Map(UnaryNode):
    """Attributes: the node below, and the function; it gets a tuple's members as arguments."""

    parent: Node
    function: Callable[..., Any]

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.parent.one_to_one

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return MapIterator(self.parent.iterate(context), self.function)


class MapIterator(UnaryIterator):
    """One pass; has no state of its own."""

    def __init__(self, parent: ElementIterator, function: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._function = function

    def __next__(self) -> Any:
        element = next(self._parent)
        try:
            if type(element) is tuple:
                return tree.to_numpy(self._function(*element))
            return tree.to_numpy(self._function(element))
        except StopIteration as error:
            # It would pass for the end of the sequence, and elements would be missing silently.
            raise RuntimeError("the function given to map raised StopIteration") from error
