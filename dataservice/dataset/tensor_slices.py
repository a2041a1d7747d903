"""``Dataset.from_tensor_slices``: rows of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.node import IndexedSource
from dataservice.dataset.spec import Spec, spec_of, unstacked


@dataclass(frozen=True, eq=False)
class TensorSlices(IndexedSource):
    """Element i holds ``array[i]`` of every array, as a read-only view.

    Attributes:
        arrays: Dicts and tuples, nested, of arrays of shape (rows, ...).
        rows: Their common first dimension.
    """

    arrays: Any
    rows: int

    @classmethod
    def of(cls, tensors: Any) -> Self:
        """Local. Check the arrays and describe their rows.

        Raises:
            ValueError: There is no array, one has no dimension, or their lengths differ.
        """
        arrays = tree.map_leaves(_read_only, tree.with_dicts(tensors))
        lengths = [len(array) for array in tree.flatten(arrays)]
        if not lengths:
            raise ValueError("from_tensor_slices and from_tensors need at least one array")
        if len(set(lengths)) > 1:
            raise ValueError(f"the arrays must have the same number of rows, not {lengths}")
        return cls(arrays, lengths[0])

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return self.rows

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        if self.rows and not self.has_static_spec:
            return spec_of(self.element(0))
        return unstacked(spec_of(self.arrays))

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`; nothing but objects themselves says what they are."""
        return not any(array.dtype.kind in "OT" for array in tree.flatten(self.arrays))

    def element(self, index: int) -> Any:
        """Local. See :class:`IndexedSource`."""
        return tree.map_leaves(lambda array: tree.row(array, index), self.arrays)

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        shown = tree.map_leaves(lambda array: f"{array.dtype}{list(array.shape)}", self.arrays)
        return f"from_tensor_slices({shown!r})"


class Tensors(TensorSlices):
    """The only element holds arrays as they are: those of the slices have one row."""

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        shown = tree.map_leaves(lambda array: f"{array.dtype}{list(array.shape[1:])}", self.arrays)
        return f"from_tensors({shown!r})"


def as_only_row(leaf: Any) -> np.ndarray[Any, Any]:
    """Local. An array of one row, which is what is given."""
    array: np.ndarray[Any, Any] = tree.array_of(tree.on_host(leaf))[np.newaxis]
    return array


def _read_only(leaf: Any) -> np.ndarray[Any, Any]:
    # A view, because elements that were changed in place would change the next pass.
    array = tree.array_of(tree.on_host(leaf)).view()
    if array.ndim == 0:
        raise ValueError(f"from_tensor_slices needs arrays with rows, not the scalar {leaf!r}")
    array.flags.writeable = False
    return array
