"""Elements: arrays, and dicts and tuples of them, nested. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist import host_view
from mpidist.cuda import lies_on_gpu
from mpidist.errors import InvalidArgumentError

_NUMPY = (np.ndarray, np.generic)
_CONVERTED = (bool, int, float, complex, str, bytes, list, memoryview)


def map_leaves(function: Callable[[Any], Any], element: Any) -> Any:
    """Local. The element with every leaf replaced by ``function(leaf)``."""
    if isinstance(element, dict):
        return {key: map_leaves(function, value) for key, value in element.items()}
    if isinstance(element, tuple):
        values = [map_leaves(function, value) for value in element]
        return type(element)(*values) if hasattr(element, "_fields") else tuple(values)
    return function(element)


def read_only(element: Any) -> Any:
    """Local. The element with views of its arrays that cannot be written into."""
    return map_leaves(_read_only, element)


def opened(element: Any) -> Any:
    """Local. The element with the same leaves in dicts and tuples of its own."""
    if isinstance(element, dict | tuple):
        return map_leaves(lambda leaf: leaf, element)
    return element


def _read_only(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    view = leaf.view()
    view.flags.writeable = False
    return view


def flatten(element: Any, like: Any = None) -> list[Any]:
    """Local. The leaves, depth first.

    Args:
        element: The element.
        like: Another one of the same structure: dicts are in the order of its keys. By default in
            that of their own.
    """
    if isinstance(element, _NUMPY):
        return [element]
    leaves: list[Any] = []
    if like is None:
        map_leaves(leaves.append, element)
    else:
        _add_leaves(leaves, element, like)
    return leaves


def _add_leaves(leaves: list[Any], element: Any, like: Any) -> None:
    if isinstance(like, dict):
        for key, one in like.items():
            _add_leaves(leaves, element[key], one)
    elif isinstance(like, tuple):
        for part, one in zip(element, like, strict=True):
            _add_leaves(leaves, part, one)
    else:
        leaves.append(element)


def columns(elements: Sequence[Any]) -> list[list[Any]]:
    """Local. For each leaf of the first element, those of all elements.

    Raises:
        InvalidArgumentError: They differ in structure.
    """
    first = structure(elements[0])
    for number, element in enumerate(elements):
        check_structure(number, element, first)
    rows = [flatten(element, elements[0]) for element in elements]
    return [list(column) for column in zip(*rows, strict=True)]


def check_structure(number: int, element: Any, first: Any) -> None:
    """Local. InvalidArgumentError unless an element has the structure of the first one."""
    if structure(element) != first:
        raise InvalidArgumentError(
            f"cannot put elements of different structure together: element 0 has {first!r}, "
            f"element {number} has {structure(element)!r}"
        )


def unflatten(like: Any, leaves: list[Any]) -> Any:
    """Local. An element of the structure of ``like`` with other leaves."""
    rest = iter(leaves)
    return map_leaves(lambda _: next(rest), like)


def structure(element: Any) -> Any:
    """Local. The element with ``None`` for every leaf; equal for elements of equal structure."""
    return map_leaves(lambda _: None, element)


def to_numpy(element: Any) -> Any:
    """Local. Python numbers, strings and lists as NumPy scalars and arrays; most others stay.

    A memoryview, which cannot be pickled, becomes an array of its memory.
    """
    if isinstance(element, _NUMPY):
        return element
    return map_leaves(_leaf_to_numpy, element)


def only_numpy(element: Any) -> Any:
    """Local. The element with all leaves in NumPy.

    Raises:
        TypeError: A leaf is neither NumPy's nor has ``__array__``.
    """
    if isinstance(element, _NUMPY):
        return element
    return map_leaves(_array_of, element)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Local. A dtype in this machine's order of bytes: that of arrays put together, by NumPy."""
    return dtype if dtype.isnative else np.result_type(dtype)


def nbytes(element: Any) -> int:
    """Local. Bytes of an element's arrays; other leaves count as 64."""
    if isinstance(element, _NUMPY):
        return int(element.nbytes)
    return sum(int(getattr(leaf, "nbytes", 64)) for leaf in flatten(element))


def on_host(leaf: Any) -> Any:
    """Local. An array on a GPU as one of the host; anything else as it is."""
    if isinstance(leaf, _NUMPY) or not lies_on_gpu(leaf):
        return leaf
    return np.array(host_view(leaf))  # not in pinned memory, which is not to be kept


def _leaf_to_numpy(leaf: Any) -> Any:
    return np.asarray(leaf)[()] if isinstance(leaf, _CONVERTED) else leaf


def _array_of(leaf: Any) -> Any:
    if isinstance(leaf, _NUMPY):
        return leaf
    leaf = on_host(leaf)
    if not hasattr(leaf, "__array__"):
        raise TypeError(f"{type(leaf).__name__} {leaf!r} has no form in NumPy; iterate directly")
    return np.asarray(leaf)
