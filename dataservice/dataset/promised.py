"""Elements that must be what somebody has said they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node, Place, UnaryIterator, UnaryNode
from dataservice.dataset.spec import Spec, fits, spec_of
from mpidist.errors import InvalidArgumentError


@dataclass(frozen=True)
class Promised(UnaryNode):
    """Elements that must be what is said.

    Attributes:
        parent: The node below.
        spec: What its elements are said to be like.
        converts: Whether numbers get the dtype that is said, where they stay what they are.
    """

    parent: Node
    spec: Spec
    converts: bool = False

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return self.spec

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`."""
        return True

    def indexed_length(self) -> int | None:
        """Return the length of the node below; see :class:`Node`."""
        return self.parent.indexed_length()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return PromisedIterator(self, self.parent.read(places, context))

    def _iterate(self, context: Context) -> ElementIterator:
        return PromisedIterator(self, self.parent.iterate(context))


class PromisedIterator(UnaryIterator):
    """One pass; InvalidArgumentError at an element that is another."""

    def __init__(self, node: Promised, parent: ElementIterator) -> None:
        super().__init__(parent)
        self._node = node

    def __next__(self) -> Any:
        element = next(self._parent)
        if self._node.converts:
            element = _converted(element, self._node.spec)
        if not fits(element, self._node.spec):
            raise InvalidArgumentError(
                f"an element of {self._node.parent.summary()} has the spec {spec_of(element)}, "
                f"but its element_spec is {self._node.spec}"
            )
        return element


def _converted(element: Any, spec: Spec) -> Any:
    """The element with dtypes that are said, as far as it has the structure."""
    if tree.structure(element) != tree.structure(spec):
        return element
    pairs = zip(tree.flatten(element), tree.flatten(spec, element), strict=True)
    return tree.unflatten(element, [_with_dtype(leaf, said) for leaf, said in pairs])


def _with_dtype(leaf: Any, said: Any) -> Any:
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype == said.dtype:
        return leaf
    if not leaf.size:  # an empty list says nothing of what would be in it
        return leaf.astype(said.dtype)
    kinds = leaf.dtype.kind, said.dtype.kind
    whole = all(kind in "biu" for kind in kinds)
    numbers = all(kind in "biufc" for kind in kinds)
    if not whole and not (numbers and np.can_cast(leaf.dtype, said.dtype, "same_kind")):
        return leaf
    converted = leaf.astype(said.dtype)
    return leaf if whole and not np.array_equal(converted, leaf) else converted
