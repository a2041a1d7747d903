"""``Dataset.rebatch``: batches of another size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
from dataservice.dataset.spec import Spec, stacked, unstacked
from mpidist.errors import InvalidArgumentError

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rebatch(UnaryNode):
    """Cuts the rows of elements into batches of ``batch_size`` ones.

    Attributes:
        parent: The node below, whose elements are arrays with equally many rows.
        batch_size: Rows in a batch.
        drop_remainder: Whether to leave a smaller last batch out.
    """

    parent: Node
    batch_size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"rebatch needs a batch_size of at least 1, not {self.batch_size}")

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        rows = self.batch_size if self.drop_remainder else None
        return stacked(unstacked(self.parent.element_spec()), rows)

    def _iterate(self, context: Context) -> ElementIterator:
        return RebatchIterator(self, context)


class RebatchIterator(UnaryIterator):
    """One pass; holds the element whose rows come next."""

    def __init__(self, node: Rebatch, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        self._element: Any = None
        self._rows = 0
        self._next = 0

    def __next__(self) -> Any:
        pieces, missing = [], self._node.batch_size
        while missing and self._has_rows():
            start, self._next = self._next, min(self._next + missing, self._rows)
            pieces.append(_rows_from(self._element, start, self._next))
            missing -= self._next - start
        if not pieces or (missing and self._node.drop_remainder):
            raise StopIteration
        return _joined(pieces)

    def get_state(self) -> tuple[Any, int, int, Any]:
        """Local. See :class:`ElementIterator`; an element of which rows are left is part of it."""
        held = self._element if self._next < self._rows else None
        return held, self._rows, self._next, super().get_state()

    def set_state(self, state: tuple[Any, int, int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._element, self._rows, self._next, below = state
        super().set_state(below)

    def _has_rows(self) -> bool:
        """Whether there are more, for which elements are taken."""
        while self._next == self._rows:
            try:
                element = next(self._parent)
            except StopIteration:
                return False
            self._rows, self._next, self._element = _rows_of(element), 0, element
        return True


def _rows_of(element: Any) -> int:
    leaves = tree.flatten(element)
    if not all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
        raise InvalidArgumentError(
            f"rebatch needs arrays with at least one dimension, on the host, not {element!r}"
        )
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:
        raise InvalidArgumentError(
            "rebatch needs arrays with the same number of rows in an element, not "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def _rows_from(element: Any, start: int, stop: int) -> Any:
    return tree.map_leaves(lambda array: array[start:stop], element)


def _joined(pieces: Sequence[Any]) -> Any:
    columns = tree.columns(pieces)
    for component, (first, *others) in enumerate(columns):
        for other in others:
            if not _alike(first, other):
                raise InvalidArgumentError(
                    "cannot batch arrays of different dtypes or shapes in component "
                    f"{component}: rows have {first.dtype}{list(first.shape[1:])} and "
                    f"{other.dtype}{list(other.shape[1:])}"
                )
    # Copies, so that a small batch does not keep the memory of a large one.
    return tree.unflatten(pieces[0], [np.concatenate(column) for column in columns])


def _alike(one: _Array, other: _Array) -> bool:
    same = tree.native(one.dtype) == tree.native(other.dtype)
    return one.shape[1:] == other.shape[1:] and (same or tree.are_text(one.dtype, other.dtype))
