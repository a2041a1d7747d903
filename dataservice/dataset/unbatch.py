"""``Dataset.unbatch``: the rows of each element as elements."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.spec import ArraySpec, Spec, spec_of, unstacked
from mpidist.errors import InvalidArgumentError


@dataclass(frozen=True)
class Unbatch(UnaryNode):
    """Attributes: the node below, whose elements are arrays with equally many rows."""

    parent: Node

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        with suppress(ValueError):  # a pass will tell
            if count > 0 and self.parent.has_static_spec:
                rows = _rows_said(self.parent.element_spec())
                return UNKNOWN_CARDINALITY if rows is None else count * rows
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        spec = self.parent.element_spec()
        return spec_of(self.first()) if _has_objects(spec) else unstacked(spec)

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`; nothing but objects themselves says what they are."""
        return self.parent.has_static_spec and not _has_objects(self.parent.element_spec())

    def _iterate(self, context: Context) -> ElementIterator:
        return UnbatchIterator(self.parent.iterate(context))


class UnbatchIterator(UnaryIterator):
    """One pass; holds the element whose rows it gives."""

    def __init__(self, parent: ElementIterator) -> None:
        super().__init__(parent)
        self._element: Any = None
        self._rows = 0
        self._next = 0

    def __next__(self) -> Any:
        while self._next == self._rows:
            self._element = next(self._parent)
            self._rows, self._next = _rows_of(self._element), 0
        row = self._next
        self._next += 1
        return tree.map_leaves(lambda array: tree.row(array, row), self._element)

    def get_state(self) -> tuple[Any, int, int, Any]:
        """Local. See :class:`ElementIterator`."""
        held = self._element if self._next < self._rows else None
        return held, self._rows, self._next, super().get_state()

    def set_state(self, state: tuple[Any, int, int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._element, self._rows, self._next, below = state
        super().set_state(below)


def _has_objects(spec: Spec) -> bool:
    """Whether rows of an array are objects."""
    arrays = [leaf for leaf in tree.flatten(spec) if isinstance(leaf, ArraySpec)]
    return any(len(array.shape) == 1 and array.dtype.kind in "OT" for array in arrays)


def _rows_said(spec: Spec) -> int | None:
    """How many rows all arrays of every element have, if that is known."""
    shapes = [leaf.shape for leaf in tree.flatten(spec) if isinstance(leaf, ArraySpec)]
    rows = {shape[0] if shape else None for shape in shapes}
    return rows.pop() if len(rows) == 1 else None


def _rows_of(element: Any) -> int:
    leaves = tree.flatten(element)
    try:
        lengths = {_length(leaf) for leaf in leaves}
    except TypeError as error:
        raise InvalidArgumentError(
            f"unbatch needs arrays with at least one dimension, not {element!r}"
        ) from error
    if len(lengths) != 1:
        raise InvalidArgumentError(
            "unbatch needs arrays with the same number of rows in an element, not "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def _length(leaf: Any) -> int:
    if isinstance(leaf, str | bytes):
        raise TypeError("text has a length, but no rows")
    return len(leaf)
