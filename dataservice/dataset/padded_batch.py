"""``Dataset.padded_batch``: elements of different lengths stacked, filled up to the longest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.batches import BatchNode, Stack
from dataservice.dataset.node import Node
from dataservice.dataset.spec import ArraySpec, Spec
from mpidist.errors import InvalidArgumentError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Padding:
    """How elements are filled up.

    Attributes:
        shapes: Of each leaf, in the structure of elements, what it is filled up to; None or -1 in
            it, or None for a whole shape: as long as the longest of the batch. A number is a shape
            of one dimension, and what has ``as_list()`` is the shape that this gives.
        values: Of each leaf, what it is filled with; a single one is for all; None: 0, or nothing
            where elements are text.

    Raises:
        InvalidArgumentError: A value is no scalar.
        TypeError: A length is no whole number.
    """

    shapes: Any = None
    values: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", _plain(self.shapes))
        if not _are_shapes(self.shapes):
            raise TypeError(
                "padded_shapes must be a shape of whole numbers and None, or a structure of such, "
                f"not {self.shapes!r}"
            )
        for value in tree.flatten(self.values):
            if np.ndim(value):
                raise InvalidArgumentError(
                    f"padding_values must be a scalar, or a structure of such, not {value!r}"
                )

    def stack(self, elements: list[Any]) -> Any:
        """Local. A batch of elements.

        Raises:
            InvalidArgumentError: Elements differ in structure, dtype or number of dimensions, or
                one is longer than its shape.
        """
        first = elements[0]
        columns = [[tree.array_of(leaf) for leaf in column] for column in tree.columns(elements)]
        shapes = _for_leaves(self.shapes, first, _is_shape)
        values = _for_leaves(self.values, first, _is_value)
        filled = [
            _filled(number, *facts)
            for number, facts in enumerate(zip(columns, shapes, values, strict=True))
        ]
        return tree.unflatten(first, filled)

    def up_to(self, length: int, element: Any) -> Padding:
        """Local. The same, with a length in place of those that are not given.

        Without shapes the first dimension of each array has the length; those without any stay.

        Args:
            length: What is filled up to.
            element: Any of the elements.
        """
        given = _for_leaves(self.shapes, element, _is_shape)
        shapes = [
            (length, *[None] * (np.ndim(leaf) - 1))[: np.ndim(leaf)]
            if shape is None
            else [length if one in (None, -1) else one for one in shape]
            for leaf, shape in zip(tree.flatten(element), given, strict=True)
        ]
        return Padding(tree.unflatten(element, shapes), self.values)

    def spec(self, element: Spec, rows: int | None) -> Spec:
        """Local. What a batch of elements is like; ``rows`` is its length, None if that differs."""
        leaves = tree.flatten(element)
        shapes = _for_leaves(self.shapes, element, _is_shape)
        batches = [
            ArraySpec((rows, *_limits(shape, len(leaf.shape))), tree.native(leaf.dtype))
            if isinstance(leaf, ArraySpec)
            else leaf
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        return tree.unflatten(element, batches)


def _for_leaves(given: Any, element: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """What is given for each leaf of an element; what stands alone is for all leaves below."""
    if given is None or is_leaf(given):
        return [given] * len(tree.flatten(element))
    if isinstance(element, dict) and isinstance(given, dict) and element.keys() == given.keys():
        pairs = [(given[key], value) for key, value in element.items()]
    elif isinstance(element, tuple) and isinstance(given, tuple) and len(element) == len(given):
        pairs = list(zip(given, element, strict=True))
    else:
        raise InvalidArgumentError(
            f"padded_batch got {given!r} for elements of the structure "
            f"{tree.structure(element)!r}: give one for all arrays, or the structure of the "
            "elements"
        )
    return [leaf for own, part in pairs for leaf in _for_leaves(own, part, is_leaf)]


def _plain(shapes: Any) -> Any:
    """Shapes as they are used: of what others have for a shape, tuples."""
    if isinstance(shapes, Integral) and not isinstance(shapes, bool):
        return (int(shapes),)
    if hasattr(shapes, "as_list"):
        with suppress(ValueError):  # not even the number of dimensions is known
            return tuple(shapes.as_list())
        return None
    if isinstance(shapes, dict):
        return {key: _plain(shape) for key, shape in shapes.items()}
    if isinstance(shapes, tuple) and not _is_shape(shapes):
        parts = [_plain(shape) for shape in shapes]
        return type(shapes)(*parts) if hasattr(shapes, "_fields") else tuple(parts)
    return shapes


def _is_shape(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(
        one is None or isinstance(one, Integral) for one in given
    )


def _are_shapes(given: Any) -> bool:
    if isinstance(given, dict | tuple) and not _is_shape(given):
        parts = given.values() if isinstance(given, dict) else given
        return all(_are_shapes(part) for part in parts)
    return given is None or _is_shape(given)


def _is_value(given: Any) -> bool:
    return not isinstance(given, tuple | dict)


def _limits(shape: Any, ndim: int) -> list[int | None]:
    if shape is None:
        return [None] * ndim
    if len(shape) != ndim:
        raise InvalidArgumentError(
            f"padded_batch: the shape {shape!r} has {len(shape)} dimensions, but an array of "
            f"the elements has {ndim}"
        )
    return [None if one in (None, -1) else int(one) for one in shape]


def _filled(number: int, column: list[Array], shape: Any, value: Any) -> Array:
    first = column[0]
    for array in column:
        alike = tree.native(array.dtype) == tree.native(first.dtype)
        alike = alike or tree.are_text(array.dtype, first.dtype)
        if array.ndim != first.ndim or not alike:
            raise InvalidArgumentError(
                f"cannot batch arrays of different dtypes or shapes in component {number}: "
                f"{first.dtype}{list(first.shape)} and {array.dtype}{list(array.shape)}"
            )
    longest = [max(lengths) for lengths in zip(*(array.shape for array in column), strict=True)]
    limits = _limits(shape, first.ndim)
    target = [
        there if limit is None else limit for there, limit in zip(longest, limits, strict=True)
    ]
    if any(there > limit for there, limit in zip(longest, target, strict=True)):
        raise InvalidArgumentError(
            f"padded_batch: component {number} has an array of shape {longest}, which is longer "
            f"than {target}"
        )
    dtype = np.result_type(*column)
    filler = _empty_text(column, dtype) if value is None else _fitting(value, dtype)
    if filler is None:
        result = np.zeros((len(column), *target), dtype)
    else:
        result = np.full((len(column), *target), filler, np.result_type(dtype, filler.dtype))
    for row, array in enumerate(column):
        result[row : row + 1, *(slice(length) for length in array.shape)] = array
    return result


def _empty_text(column: list[Array], dtype: np.dtype[Any]) -> Array | None:
    """What objects that are text are filled up with; None where 0 is as good."""
    if dtype.kind == "O":
        for one in (one for array in column for one in array.flat):
            if isinstance(one, str | bytes):
                return np.array(one[:0], object)
    return None


def _fitting(value: Any, dtype: np.dtype[Any]) -> Array:
    """A value to fill up with in a dtype; InvalidArgumentError if that does not hold it.

    A number may be rounded where the dtype has fractions, but not made infinite. Text is as long as
    it is.
    """
    given = tree.array_of(value)
    own, kind = given.dtype.kind, dtype.kind
    filler: Array | None = None
    if isinstance(value, str | bytes) and own == "O":  # it ends with NUL
        filler = given if kind in ("O", "U" if isinstance(value, str) else "S") else None
    elif kind == "O" or ((own in "US") == (kind in "US") and (own != "c" or kind == "c")):
        with suppress(OverflowError, TypeError, ValueError), np.errstate(all="ignore"):
            filler = given.astype(kind if kind in "US" else dtype)
    if filler is not None and kind in "biu" and not (filler == given).all():
        filler = None
    if filler is not None and kind == "f":
        infinite = np.isinf(filler) & np.isfinite(given.astype(np.float64))
        filler = None if infinite.any() else filler
    if filler is None:
        raise InvalidArgumentError(
            f"padded_batch: arrays of dtype {dtype} cannot be padded with {value!r}"
        )
    return filler


class _Stack:
    """Elements, to be filled up when all are there."""

    def __init__(self, padding: Padding) -> None:
        self._padding = padding
        self._elements: list[Any] = []

    def append(self, element: Any) -> None:
        self._elements.append(element)

    def result(self) -> Any:
        return self._padding.stack(self._elements)


@dataclass(frozen=True)
class PaddedBatch(BatchNode):
    """Stacks ``batch_size`` elements, filled up.

    Attributes:
        parent: The node below.
        batch_size: Elements in a batch.
        padding: How they are filled up.
        drop_remainder: Whether to leave a smaller last batch out.
    """

    parent: Node
    batch_size: int
    padding: Padding
    drop_remainder: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(
                f"padded_batch needs a batch_size of at least 1, not {self.batch_size}"
            )

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        rows = self.batch_size if self.drop_remainder else None
        return self.padding.spec(self.parent.element_spec(), rows)

    def stack(self) -> Stack:
        """Local. See :class:`BatchNode`."""
        return _Stack(self.padding)
