"""``Dataset.batch``: consecutive elements stacked along a new first axis."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.node import Context, ElementIterator, Node, UnaryIterator, UnaryNode
from dataservice.dataset.spec import Spec, stacked
from mpidist.errors import InvalidArgumentError, type_name

# Dtypes whose item size differs from element to element.
_FLEXIBLE = "OSUV"


@dataclass(frozen=True)
class Batch(UnaryNode):
    """Stacks ``batch_size`` elements; the last batch may be smaller.

    Attributes:
        parent: The node below.
        batch_size: Elements in a batch.
        drop_remainder: Whether to leave a smaller last batch out.
    """

    parent: Node
    batch_size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch needs a batch_size of at least 1, not {self.batch_size}")

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        count = self.parent.cardinality()
        if count < 0:
            return count
        return count // self.batch_size if self.drop_remainder else -(-count // self.batch_size)

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return stacked(self.parent.element_spec(), self.batch_size if self.drop_remainder else None)

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return BatchIterator(self.parent.iterate(context), self.batch_size, self.drop_remainder)


class BatchIterator(UnaryIterator):
    """One pass; holds nothing between two batches."""

    def __init__(self, parent: ElementIterator, size: int, drop_remainder: bool) -> None:
        super().__init__(parent)
        self._size = size
        self._drop = drop_remainder

    def __next__(self) -> Any:
        first = next(self._parent)
        stack = _Stack(first, self._size)
        rest = itertools.islice(self._parent, self._size - 1)
        for element in rest:
            try:
                stack.append(element)
            except InvalidArgumentError:
                deque(rest, maxlen=0)  # the next batch begins where it would have begun
                raise
        if stack.rows < self._size and self._drop:
            raise StopIteration
        return stack.result()


class _Stack:
    """Rows of a batch, written in place as they come."""

    def __init__(self, first: Any, size: int) -> None:
        self._first = first
        self._structure = tree.structure(first)
        self._columns = [_column(leaf, size) for leaf in tree.flatten(first)]
        self.rows = 0
        self.append(first)

    def append(self, element: Any) -> None:
        leaves = tree.flatten(element)
        if len(leaves) != len(self._columns) or tree.structure(element) != self._structure:
            raise InvalidArgumentError(
                f"cannot batch elements of different structure: element 0 has "
                f"{self._structure!r}, element {self.rows} has {tree.structure(element)!r}"
            )
        for component, (column, leaf) in enumerate(zip(self._columns, leaves, strict=True)):
            if isinstance(column, list):
                column.append(leaf)
                continue
            if leaf.shape != column.shape[1:] or leaf.dtype != column.dtype:
                raise InvalidArgumentError(
                    f"cannot batch arrays of different kinds in component {component}: element 0 "
                    f"has {column.dtype}{list(column.shape[1:])}, element {self.rows} has "
                    f"{leaf.dtype}{list(leaf.shape)}"
                )
            column[self.rows] = leaf
        self.rows += 1

    def result(self) -> Any:
        columns = [
            np.stack(column) if isinstance(column, list) else column[: self.rows]
            for column in self._columns
        ]
        return tree.unflatten(self._first, columns)


def _column(leaf: Any, size: int) -> np.ndarray[Any, Any] | list[Any]:
    if not isinstance(leaf, np.ndarray | np.generic):
        raise InvalidArgumentError(
            f"cannot batch {type_name(leaf)} objects; make map return arrays or numbers of the "
            "host (prefetch_to_device comes last)"
        )
    if leaf.dtype.kind in _FLEXIBLE:
        return []
    return np.empty((size, *leaf.shape), leaf.dtype)
