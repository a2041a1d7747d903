"""Functions on elements, which are nested dicts and tuples of arrays.

Users' functions are called here, too, because the members of a tuple are their arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mpidist import host_view
from mpidist.errors import InvalidArgumentError
from mpidist.gpu import lies_on_gpu

Array = np.ndarray[Any, Any]

_NUMPY = (np.ndarray, np.generic)
_TEXT = (str, bytes)
_BOOLS = (bool, np.bool_)
_CONVERTED = (bool, int, float, complex, list, memoryview)


def map_leaves(function: Callable[[Any], Any], element: Any) -> Any:
    """Return an element with every leaf replaced by ``function(leaf)``."""
    if isinstance(element, dict):
        return {key: map_leaves(function, value) for key, value in element.items()}
    if isinstance(element, tuple):
        values = [map_leaves(function, value) for value in element]
        return type(element)(*values) if hasattr(element, "_fields") else tuple(values)
    return function(element)


def read_only(element: Any) -> Any:
    """Return an element with read-only views of its arrays."""
    return map_leaves(_read_only, element)


def copy_structure(element: Any) -> Any:
    """Return an element with the same leaves in new dicts and tuples."""
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
    """Return the leaves, depth first.

    Args:
        element: The element.
        like: An element of the same structure, for the order of keys. By default each dict
            of ``element`` has its own order.
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
    """Return a list for each leaf of the first element, with that leaf of all elements.

    Raises:
        InvalidArgumentError: The elements differ in structure.
    """
    first = structure(elements[0])
    for number, element in enumerate(elements):
        check_structure(number, element, first)
    rows = [flatten(element, elements[0]) for element in elements]
    return [list(column) for column in zip(*rows, strict=True)]


def check_structure(number: int, element: Any, first: Any) -> None:
    """Raise InvalidArgumentError unless an element has the structure of the first one."""
    if structure(element) != first:
        raise InvalidArgumentError(
            f"cannot combine elements of different structures: element 0 has {first!r}, element "
            f"{number} has {structure(element)!r}"
        )


def unflatten(like: Any, leaves: list[Any]) -> Any:
    """Return an element of the structure of ``like`` with other leaves."""
    rest = iter(leaves)
    return map_leaves(lambda _: next(rest), like)


def structure(element: Any) -> Any:
    """Return an element with ``None`` for every leaf, to compare structures."""
    return map_leaves(lambda _: None, element)


def to_numpy(element: Any) -> Any:
    """Return an element with NumPy scalars and arrays for Python numbers, strings and lists.

    A memoryview, which cannot be pickled, becomes an array of its memory. Text that ends with NUL
    stays Python's, because NumPy drops trailing NULs. Most other leaves stay, too.
    """
    if isinstance(element, _NUMPY) and not isinstance(element, _TEXT):
        return element
    return map_leaves(_leaf_to_numpy, element)


def with_dicts(element: Any) -> Any:
    """Return an element with a dict in place of every other mapping, such as an .npz file."""
    return map_leaves(
        lambda leaf: with_dicts(dict(leaf)) if isinstance(leaf, Mapping) else leaf, element
    )


def array_of(value: Any) -> Array:
    """Return an array of a value; an array of objects if it holds text that ends with NUL."""
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
    """Return whether both dtypes are of text of one kind. Text that ends with NUL is objects."""
    return {one.kind, other.kind} in ({"S"}, {"U"}, {"S", "O"}, {"U", "O"})


def row(array: Any, index: int) -> Any:
    """Return a row of an array. Objects are converted to NumPy."""
    found = array[index]
    return found if isinstance(found, _NUMPY) else to_numpy(found)


def only_numpy(element: Any) -> Any:
    """Return an element with NumPy leaves only, except for text that ends with NUL.

    Raises:
        TypeError: A leaf is neither NumPy's nor has ``__array__``.
    """
    if isinstance(element, _NUMPY):
        return element
    return map_leaves(_only_numpy, element)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype in native byte order, as NumPy does when it joins arrays."""
    return dtype if dtype.isnative else np.result_type(dtype)


def nbytes(element: Any) -> int:
    """Return the bytes of an element's arrays. Text counts its length, other leaves 64."""
    if isinstance(element, _NUMPY):
        return int(element.nbytes)
    return sum(
        len(leaf) if isinstance(leaf, _TEXT) else int(getattr(leaf, "nbytes", 64))
        for leaf in flatten(element)
    )


def on_host(leaf: Any) -> Any:
    """Return a host copy of an array on a GPU; any other leaf as it is."""
    if isinstance(leaf, _NUMPY) or not lies_on_gpu(leaf):
        return leaf
    return np.array(host_view(leaf))  # not in pinned memory, which is not to be kept


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def call(function: Callable[..., Any], element: Any, method: str) -> Any:
    """Call a user's function with an element.

    Args:
        function: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        method: Name of the transformation, for messages.

    Raises:
        RuntimeError: It raised StopIteration, which would end the sequence silently.
        Exception: The error of the function.
    """
    try:
        return function(*element) if type(element) is tuple else function(element)
    except StopIteration as error:
        raise RuntimeError(f"the function given to {method} raised StopIteration") from error


def call_predicate(predicate: Callable[..., Any], element: Any, method: str) -> bool:
    """Call a user's predicate with an element.

    Args:
        predicate: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        method: Name of the transformation, for messages.

    Raises:
        InvalidArgumentError: It returned neither a bool nor a whole number.
        Exception: As :func:`call`.
    """
    answer = call(predicate, element, method)
    if isinstance(answer, _BOOLS):
        return bool(answer)
    answer = on_host(answer)
    if isinstance(answer, int) or hasattr(answer, "__array__"):
        array = np.asarray(answer)
        if array.ndim == 0 and array.dtype.kind in "biu":
            return bool(array)
    raise _wrong(predicate, method, answer, "a bool")


def call_int(function: Callable[..., Any], element: Any, method: str) -> int:
    """Call a user's function that returns a whole number with an element.

    Args:
        function: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        method: Name of the transformation, for messages.

    Raises:
        InvalidArgumentError: It returned something else.
        Exception: As :func:`call`.
    """
    answer = on_host(call(function, element, method))
    with suppress(TypeError):
        if not isinstance(answer, bool):
            return operator.index(answer)
    raise _wrong(function, method, answer, "a whole number")


def _wrong(
    function: Callable[..., Any], method: str, answer: Any, wanted: str
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the function {name_of(function)} given to {method} returned {answer!r}: it must return "
        f"{wanted}"
    )


def _leaf_to_numpy(leaf: Any) -> Any:
    if isinstance(leaf, _TEXT):
        return _python_text(leaf) if _ends_with_nul(leaf) else np.asarray(leaf)[()]
    return array_of(leaf)[()] if isinstance(leaf, _CONVERTED) else leaf


def _ends_with_nul(value: Any) -> bool:
    if isinstance(value, str):
        return value.endswith("\0")
    return isinstance(value, bytes) and value.endswith(b"\0")


def _python_text(value: Any) -> Any:
    """Return text as Python's own. NumPy's scalars lose trailing NULs when they are pickled."""
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
