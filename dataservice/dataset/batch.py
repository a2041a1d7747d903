"""``Dataset.batch``: consecutive elements stacked along a new first axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.batches import BatchNode, Stack
from dataservice.dataset.node import Node
from dataservice.dataset.spec import Spec, stacked
from mpidist.errors import InvalidArgumentError, type_name

# Dtypes whose item size differs from element to element.
_FLEXIBLE = "OSTUV"

_Array = np.ndarray[Any, Any]
_NUMPY = (np.ndarray, np.generic)


@dataclass(frozen=True)
class Batch(BatchNode):
    """Stacks ``batch_size`` elements.

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

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return stacked(self.parent.element_spec(), self.batch_size if self.drop_remainder else None)

    def stack(self) -> Stack:
        """Local. See :class:`BatchNode`."""
        return _Stack(self.batch_size)


def stack(elements: Sequence[Any]) -> Any:
    """Return a batch of elements.

    Raises:
        InvalidArgumentError: Elements differ in structure, shape or dtype.
    """
    rows = _Stack(len(elements))
    for element in elements:
        rows.append(element)
    return rows.result()


class _Stack:
    """Rows of a batch, written in place as they come."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows = 0
        self._first: Any = None
        self._structure: Any = None
        self._columns: list[_Array | list[_Array]] = []

    def append(self, element: Any) -> None:
        if not self._rows:
            self._first, self._structure = element, tree.structure(element)
            self._columns = [_column(leaf, self._size) for leaf in tree.flatten(element)]
        else:
            tree.check_structure(self._rows, element, self._structure)
        leaves = tree.flatten(element, self._first)
        for component, (column, leaf) in enumerate(zip(self._columns, leaves, strict=True)):
            array: Any = leaf if isinstance(leaf, _NUMPY) else _array(leaf)
            if isinstance(column, list):
                if column and not _alike(array, column[0]):
                    raise _misfit(component, column[0], self._rows, array)
                column.append(array)
                continue
            alike = array.dtype == column.dtype or tree.native(array.dtype) == column.dtype
            if array.shape != column.shape[1:] or not alike:
                raise _misfit(component, column[0], self._rows, array)
            column[self._rows] = array
        self._rows += 1

    def result(self) -> Any:
        columns = [
            np.stack(column) if isinstance(column, list) else column[: self._rows]
            for column in self._columns
        ]
        return tree.unflatten(self._first, columns)


def _alike(one: _Array, other: _Array) -> bool:
    if one.shape != other.shape:
        return False
    return one.dtype.kind == other.dtype.kind or tree.are_text(one.dtype, other.dtype)


def _misfit(component: int, first: _Array, number: int, other: _Array) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"cannot batch arrays of different dtypes or shapes in component {component}: "
        f"element 0 has {first.dtype}{list(first.shape)}, element {number} has "
        f"{other.dtype}{list(other.shape)}"
    )


def _array(leaf: Any) -> _Array:
    if not isinstance(leaf, str | bytes):
        raise InvalidArgumentError(
            f"cannot batch objects of type {type_name(leaf)}: elements must be arrays or "
            "numbers on the host (call prefetch_to_device last)"
        )
    return tree.array_of(leaf)


def _column(leaf: Any, size: int) -> _Array | list[_Array]:
    array = leaf if isinstance(leaf, _NUMPY) else _array(leaf)
    if array.dtype.kind in _FLEXIBLE:
        return []
    return np.empty((size, *array.shape), tree.native(array.dtype))
