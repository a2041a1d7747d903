"""Elements: arrays, and dicts and tuples of them, nested. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpidist import host_view
from mpidist.errors import InvalidArgumentError
from mpidist.gpu import lies_on_gpu

Array = np.ndarray[Any, Any]

_NUMPY = (np.ndarray, np.generic)
_TEXT = (str, bytes)
_CONVERTED = (bool, int, float, complex, list, memoryview)


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
            f"cannot combine elements of different structures: element 0 has {first!r}, element "
            f"{number} has {structure(element)!r}"
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

    A memoryview, which cannot be pickled, becomes an array of its memory. Text that ends with NUL
    stays Python's, because NumPy's would lose these.
    """
    if isinstance(element, _NUMPY) and not isinstance(element, _TEXT):
        return element
    return map_leaves(_leaf_to_numpy, element)


def with_dicts(element: Any) -> Any:
    """Local. The element with a dict in place of every other mapping, as the arrays of a file."""
    return map_leaves(
        lambda leaf: with_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf, element
    )


def array_of(value: Any) -> Array:
    """Local. An array of what is given; of Python's objects if it holds text that ends with NUL."""
    array: Array = np.asarray(value)
    if array.dtype.kind not in "SU" or isinstance(value, np.ndarray):
        return array
    if isinstance(value, _TEXT):
        return _objects([value], ()) if _ends_with_nul(value) else array
    texts = np.asarray(value, object)
    if any(_ends_with_nul(text) for text in texts.flat):
        return _objects(texts.flat, texts.shape)
    return array


def are_text(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Local. Whether both are of text of one kind; what ends with NUL is objects among the rest."""
    return {one.kind, other.kind} in ({"S"}, {"U"}, {"S", "O"}, {"U", "O"})


def row(array: Any, index: int) -> Any:
    """Local. A row of an array; of one of objects, what NumPy makes of the object."""
    found = array[index]
    return found if isinstance(found, _NUMPY) else to_numpy(found)


def only_numpy(element: Any) -> Any:
    """Local. The element with all leaves in NumPy, but for text that ends with NUL.

    Raises:
        TypeError: A leaf is neither NumPy's nor has ``__array__``.
    """
    if isinstance(element, _NUMPY):
        return element
    return map_leaves(_only_numpy, element)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Local. A dtype in this machine's order of bytes: that of arrays put together, by NumPy."""
    return dtype if dtype.isnative else np.result_type(dtype)


def nbytes(element: Any) -> int:
    """Local. Bytes of an element's arrays; text as its length, other leaves as 64."""
    if isinstance(element, _NUMPY):
        return int(element.nbytes)
    return sum(
        len(leaf) if isinstance(leaf, _TEXT) else int(getattr(leaf, "nbytes", 64))
        for leaf in flatten(element)
    )


def on_host(leaf: Any) -> Any:
    """Local. An array on a GPU as one of the host; anything else as it is."""
    if isinstance(leaf, _NUMPY) or not lies_on_gpu(leaf):
        return leaf
    return np.array(host_view(leaf))  # not in pinned memory, which is not to be kept


def _leaf_to_numpy(leaf: Any) -> Any:
    if isinstance(leaf, _TEXT):
        return _python_text(leaf) if _ends_with_nul(leaf) else np.asarray(leaf)[()]
    return array_of(leaf)[()] if isinstance(leaf, _CONVERTED) else leaf


def _ends_with_nul(value: Any) -> bool:
    if isinstance(value, str):
        return value.endswith("\0")
    return isinstance(value, bytes) and value.endswith(b"\0")


def _python_text(value: Any) -> Any:
    """Text as Python's own: NumPy's scalars have all of it, but lose it when they are pickled."""
    if isinstance(value, str):
        return str.__str__(value)  # str() has that of NumPy, which leaves them out
    return bytes(value) if isinstance(value, bytes) else value


def _objects(values: Iterable[Any], shape: tuple[int, ...]) -> Array:
    return np.fromiter(map(_python_text, values), object).reshape(shape)


def _only_numpy(leaf: Any) -> Any:
    leaf = to_numpy(leaf) if isinstance(leaf, _TEXT) else leaf
    if isinstance(leaf, (*_NUMPY, *_TEXT)):
        return leaf
    leaf = on_host(leaf)
    if not hasattr(leaf, "__array__"):
        raise TypeError(
            f"{type(leaf).__name__} {leaf!r} cannot be converted to NumPy: iterate over the "
            "dataset itself"
        )
    return np.asarray(leaf)
