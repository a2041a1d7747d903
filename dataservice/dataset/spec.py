"""Specs of elements: the shape and dtype of every array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dataservice.dataset import tree
from mpidist.errors import InvalidArgumentError

Spec = Any
"""An element with an ArraySpec in place of every array, and its type in place of other leaves."""


@dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of an array, as TensorFlow's TensorSpec.

    Args:
        shape: The lengths; None for a length that may differ from element to element.
        dtype: Anything that NumPy accepts as a dtype.

    Raises:
        TypeError: A length is not a whole number, or the dtype is not a dtype.
        ValueError: A length is negative.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]

    def __init__(self, shape: Iterable[int | None], dtype: DTypeLike) -> None:
        lengths = tuple(None if length is None else index(length) for length in shape)
        if min([length for length in lengths if length is not None], default=0) < 0:
            raise ValueError(f"an array cannot have the shape {lengths}")
        object.__setattr__(self, "shape", lengths)
        object.__setattr__(self, "dtype", np.dtype(dtype))


def spec_of(element: Any) -> Spec:
    """Return the spec of an element."""
    return tree.map_leaves(_leaf, element)


def spec_from(signature: Any) -> Spec:
    """Return the spec of a signature of specs, arrays or tensors, of this library or another.

    Raises:
        TypeError: A leaf has no shape or dtype.
        ValueError: The number of dimensions is not known.
    """
    return tree.map_leaves(_said, tree.with_dicts(signature))


def _said(leaf: Any) -> ArraySpec:
    if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(f"a signature needs an ArraySpec for each array, not {leaf!r}")
    shape = leaf.shape.as_list() if hasattr(leaf.shape, "as_list") else leaf.shape
    return ArraySpec(shape, getattr(leaf.dtype, "as_numpy_dtype", leaf.dtype))


def fits(element: Any, spec: Spec) -> bool:
    """Return whether an element has a spec. Text may have any length."""
    if isinstance(spec, dict):
        same = isinstance(element, dict) and element.keys() == spec.keys()
        return same and all(fits(element[key], spec[key]) for key in spec)
    if isinstance(spec, tuple):
        same = isinstance(element, tuple) and len(element) == len(spec)
        return same and all(map(fits, element, spec))
    found = _leaf(element)
    if not isinstance(spec, ArraySpec) or not isinstance(found, ArraySpec):
        return bool(found == spec)
    if not (found.dtype == spec.dtype or _is_text(element, found.dtype.kind, spec.dtype.kind)):
        return False
    if len(found.shape) != len(spec.shape):
        return False
    return all(said in (None, length) for length, said in zip(found.shape, spec.shape, strict=True))


def _is_text(element: Any, kind: str, said: str) -> bool:
    """Return whether text has the given kind. Objects may be text that ends with NUL."""
    if kind == "O" and said in "SU":
        return all(isinstance(one, bytes if said == "S" else str) for one in element.flat)
    return kind in "SU" and said in (kind, "O")


def alike(one: Spec, other: Spec) -> bool:
    """Return whether specs are equal except for shapes. Text may have any length."""
    if tree.structure(one) != tree.structure(other):
        return False
    pairs = zip(tree.flatten(one), tree.flatten(other, one), strict=True)
    return all(_common(mine, its) is not None for mine, its in pairs)


def merged(specs: Sequence[Spec]) -> Spec:
    """Return the common spec of several datasets, with None for lengths that differ.

    Raises:
        InvalidArgumentError: The specs differ in structure, dtype or number of dimensions.
    """
    result = specs[0]
    for spec in specs[1:]:
        fine = alike(result, spec)
        pairs = zip(tree.flatten(result), tree.flatten(spec, result), strict=True) if fine else ()
        leaves = [_merged(one, other) for one, other in pairs]
        if not fine or None in leaves:
            raise InvalidArgumentError(
                f"the datasets have different elements, {result} and {spec}, and so no common "
                "element_spec"
            )
        result = tree.unflatten(result, leaves)
    return result


def _common(one: Any, other: Any) -> Any:
    """Return the common dtype of two arrays, or type of two other leaves; None if they differ."""
    if not isinstance(one, ArraySpec) or not isinstance(other, ArraySpec):
        return one if one == other else None
    if tree.are_text(one.dtype, other.dtype):
        return np.result_type(one.dtype, other.dtype)
    dtype = tree.native(one.dtype)
    return dtype if dtype == tree.native(other.dtype) else None


def _merged(one: Any, other: Any) -> Any:
    if not isinstance(one, ArraySpec) or one == other:
        return one
    if len(one.shape) != len(other.shape):
        return None
    pairs = zip(one.shape, other.shape, strict=True)
    shape = [length if length == its else None for length, its in pairs]
    return ArraySpec(shape, _common(one, other))


def batched(spec: Spec, rows: int | None) -> Spec:
    """Return the spec of a batch of ``rows`` elements; None if the number differs."""
    return _each(spec, lambda one: ArraySpec((rows, *one.shape), tree.native(one.dtype)))


def unbatched(spec: Spec) -> Spec:
    """Return the spec of a row of a batch."""
    return _each(spec, _row)


def unknown_lengths(spec: Spec) -> Spec:
    """Return a spec with None for all lengths."""
    return _each(spec, lambda one: ArraySpec((None,) * len(one.shape), one.dtype))


def _row(one: ArraySpec) -> ArraySpec:
    # A scalar that is taken out of an array has the machine's order of bytes, unless it has fields.
    stays = len(one.shape) > 1 or one.dtype.kind == "V"
    return ArraySpec(one.shape[1:], one.dtype if stays else tree.native(one.dtype))


def _each(spec: Spec, change: Callable[[ArraySpec], ArraySpec]) -> Spec:
    return tree.map_leaves(lambda leaf: change(leaf) if isinstance(leaf, ArraySpec) else leaf, spec)


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return ArraySpec(leaf.shape, leaf.dtype)
    if isinstance(leaf, str | bytes):  # text that NumPy's would lose the end of
        return ArraySpec((), np.asarray(leaf).dtype)
    return type(leaf)
