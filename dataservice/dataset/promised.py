"""Elements that must be what somebody has said they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node, UnaryIterator, UnaryNode
from dataservice.dataset.spec import Spec, fits, spec_of
from mpidist.errors import InvalidArgumentError


@dataclass(frozen=True)
class Promised(UnaryNode):
    """Attributes: the node below, and what its elements are said to be like."""

    parent: Node
    spec: Spec

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return self.spec

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`."""
        return True

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return PromisedIterator(self, self.parent.iterate(context))


class PromisedIterator(UnaryIterator):
    """One pass; InvalidArgumentError at an element that is another."""

    def __init__(self, node: Promised, parent: ElementIterator) -> None:
        super().__init__(parent)
        self._node = node

    def __next__(self) -> Any:
        element = next(self._parent)
        if not fits(element, self._node.spec):
            raise InvalidArgumentError(
                f"an element of {self._node.parent.summary()} is {spec_of(element)}, which is not "
                f"what element_spec says: {self._node.spec}"
            )
        return element
