"""``Dataset.map``: a function of each element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.functions import call, name_of
from dataservice.dataset.node import ElementIterator, Node, Place, UnaryIterator, UnaryNode
from dataservice.dataset.spec import Spec, spec_of
from mpidist.errors import InvalidArgumentError


@dataclass(frozen=True)
class Map(UnaryNode):
    """Attributes: the node below, and the function; it gets a tuple's members as arguments."""

    parent: Node
    function: Callable[..., Any]

    def indexed_length(self) -> int | None:
        """Return the length of the node below; see :class:`Node`."""
        return self.parent.indexed_length()

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return spec_of(self.first())

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`; a function makes elements."""
        return False

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return MapIterator(self.parent.read(places, context), self.function)

    def _iterate(self, context: Context) -> ElementIterator:
        return MapIterator(self.parent.iterate(context), self.function)


class MapIterator(UnaryIterator):
    """One pass; has no state of its own."""

    def __init__(self, parent: ElementIterator, function: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._function = function

    def __next__(self) -> Any:
        return mapped(self._function, next(self._parent), self._function)


def mapped(function: Callable[..., Any], element: Any, given: Callable[..., Any]) -> Any:
    """Local. What ``map`` makes of an element.

    Args:
        function: What is called.
        element: The element.
        given: The user's function, for messages.

    Raises:
        InvalidArgumentError: It gave None, as functions without a ``return`` do.
        Exception: What it raises.
    """
    result = tree.to_numpy(call(function, element, "map"))
    if result is None:
        raise InvalidArgumentError(
            f"the function {name_of(given)} given to map returned None: it must return an element"
        )
    return result
