"""Hashes of a dataset: the fingerprint and the identity.

Both cover the operations, the code of functions, constants and arrays. The fingerprint also covers
globals and objects. It tells whether two datasets give the same elements. The identity leaves out
all that a restarted script may change. It tells whether a state fits a dataset, and whether the
trainers of a job read the same dataset.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import hashlib
import inspect
import operator
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from dataservice.dataset.base import IDENTITY, ElementIterator, IndexedSource, Node

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_OWN_PACKAGE = f"{__package__.partition('.')[0]}."
_NUMBERS = {type(None), bool, int, float}
# Bytes of an array that are hashed at once: they are copied.
_BLOCK = 1 << 20

# Limits of an identity, so that most datasets take well below a second: SHA-256 takes 1.2 s per GB
# on a slow core, and an item of a list up to 4 us.
_MOST_BYTES_OF_ARRAY = 64 << 20
_MOST_BYTES_OF_NODE = 256 << 20
_MOST_ITEMS_OF_LIST = 1 << 16
_MOST_ITEMS_OF_NODE = 1 << 18
# Bytes of each further array or text, after the bytes of the node are spent.
_BYTES_OF_REST = 4096

# Library types with pickles that consist of functions and constants.
_REDUCED = (
    functools.partial,
    operator.itemgetter,
    operator.attrgetter,
    operator.methodcaller,
    range,
    slice,
    np.dtype,
)


def fingerprint(node: Node) -> int:
    """Return a hash of 64 bits, equal in every process that describes the same dataset.

    Functions are hashed by their code, defaults, captured values, and the globals that they name.
    Functions and classes of installed packages are hashed without the globals, because those can be
    a large part of the package.

    Raises:
        TypeError: An object that the dataset refers to cannot be pickled.
    """
    return int.from_bytes(_Hashes().of(node)[:8], "little")


def identity(node: Node) -> bytes:
    """Return the identity of a dataset: 32 bytes that tell it apart from other datasets.

    The identity is equal in all processes that run the same script with the same versions of Python
    and NumPy. It covers the operations with their arguments, the code of functions, arrays, and
    constants: numbers, text, bytes, None, and tuples, lists, dicts and sets of them. Constants and
    arrays count where operations, defaults of arguments, or variables captured by functions hold
    them. But functions may fill the lists, dicts and sets that they have captured, so of these only
    the class counts.

    Of any other object only the class counts, and of a global only the name. So a script may be
    restarted with another log folder or learning rate in a global. Datasets of equal identity may
    for the same reason have different elements: see :func:`fingerprint`.

    Arrays of more than 64 MiB are sampled: shape, dtype, and 64 blocks of 1 MiB spread evenly over
    the array. Longer text counts by its length and beginning. Lists, tuples, sets and dicts of more
    than 65,536 items are sampled evenly. After 256 MiB or 262,144 items of one operation, arrays
    and text count by their size and first 4 KiB, and lists by their length. Measured on a slow
    core: 1.2 s per GB, so 77 ms for 64 MiB. The result is kept with the node.

    It never raises. An object that cannot be hashed counts by its class.
    """
    if IDENTITY not in vars(node):
        # The nodes below come first: recursion through a long chain would exceed Python's limit.
        for each in reversed(_with_nodes_below(node)):
            vars(each)[IDENTITY] = _Identities().of(each)
    found: bytes = vars(node)[IDENTITY]
    return found


class _Hashes:
    """Computes hashes of objects; each object is hashed once."""

    def __init__(self) -> None:
        # The objects are kept: another object could get the id of a freed one.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def of(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return self._of_plain(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, _hash("an object that contains itself")
            self._known[id(value)] = value, self._of_object(value)
        return self._known[id(value)][1]

    def _of_plain(self, value: Any) -> bytes:
        if isinstance(value, str | bytes):
            return _hash(type(value).__name__, value)
        # The decimal digits of an integer are limited in number.
        text = hex(value) if type(value) is int else repr(value)
        return _hash(type(value).__name__, text)

    def _of_object(self, value: Any) -> bytes:
        kind = type(value)
        if isinstance(value, Node):
            return self._of_node(value)
        if kind in (tuple, list):
            return _hash(kind.__name__, *map(self.of, value))
        if kind in (set, frozenset):
            return _hash(kind.__name__, *sorted(map(self.of, value)))
        if kind is dict:
            return _hash("dict", *(self.of(each) for pair in value.items() for each in pair))
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return self._of_array(np.asarray(value))
        if kind is types.FunctionType:
            return self._of_function(value)
        if kind is types.CodeType:
            return self._of_code(value)
        if kind is types.CellType:
            return self._of_cell(value)
        if kind is types.ModuleType:
            return _hash("module", value.__name__)
        if isinstance(value, type):
            return self._of_class(value)
        return self._of_pickled(value)

    def _of_node(self, node: Node) -> bytes:
        return _hash(type(node).__qualname__, *map(self.of, _fields(node)))

    def _of_array(self, array: np.ndarray[Any, Any]) -> bytes:
        return _hash_array(array, array.nbytes)

    def _of_function(self, function: types.FunctionType) -> bytes:
        if str(function.__module__).startswith(_OWN_PACKAGE):
            return _hash("function", function.__module__, function.__qualname__)
        parts: list[Any] = [
            function.__code__,
            function.__defaults__,
            tuple(sorted((function.__kwdefaults__ or {}).items())),
            function.__closure__,
            *self._globals_of(function),
        ]
        return _hash("function", *map(self.of, parts))

    def _globals_of(self, function: types.FunctionType) -> list[tuple[str, Any]]:
        """Return the globals that count, with their names."""
        if _is_installed(function.__code__.co_filename):
            return []
        known = function.__globals__
        return [(name, known[name]) for name in sorted(_names(function.__code__)) if name in known]

    def _of_code(self, code: types.CodeType) -> bytes:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        parts = (code.co_consts, names, counts, code.co_exceptiontable)
        return _hash("code", code.co_code, *map(self.of, parts))

    def _of_cell(self, cell: types.CellType) -> bytes:
        try:
            content = cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            return _hash("empty cell")
        return _hash("cell", self.of(content))

    def _of_class(self, cls: type) -> bytes:
        parts = [cls.__module__, cls.__qualname__]
        if f"{cls.__module__}.".startswith(_OWN_PACKAGE) or _is_installed(_file_of(cls)):
            return _hash("class", *parts)
        members = [
            (name, member)
            for name, value in sorted(vars(cls).items())
            for member in _plain_members(value)
            # Python adds constants of its own, such as the number of the first line.
            if type(member) is types.FunctionType or not name.startswith("__")
        ]
        return _hash("class", *parts, *map(self.of, [*members, cls.__bases__]))

    def _of_pickled(self, value: Any) -> bytes:
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reducer is None else reducer(value)
        except Exception as error:
            raise TypeError(
                f"the dataset has no fingerprint, because {value!r} cannot be pickled: {error}"
            ) from error
        if isinstance(reduced, str):  # a name in a module
            return _hash("global", str(getattr(value, "__module__", "")), reduced)
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        contents = [state, items and list(items), pairs and list(pairs)]
        return _hash("object", *map(self.of, (function, arguments, *contents)))


class _Identities(_Hashes):
    """Computes the identity of one node, see :func:`identity`."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes_left = _MOST_BYTES_OF_NODE
        self._items_left = _MOST_ITEMS_OF_NODE
        self._is_in_function = False

    def _of_plain(self, value: Any) -> bytes:
        if isinstance(value, str | bytes):
            counted = self._take_bytes(len(value))
            return _hash(type(value).__name__, str(len(value)), value[:counted])
        return super()._of_plain(value)

    def _of_object(self, value: Any) -> bytes:
        try:
            if isinstance(value, tuple | list | dict | set | frozenset):
                return self._of_items(value)
            return super()._of_object(value)
        except Exception:
            return _hash("object", type(value).__qualname__)

    def _of_node(self, node: Node) -> bytes:
        if IDENTITY in vars(node):
            found: bytes = vars(node)[IDENTITY]
            return found
        values = list(node.identity_values())
        if isinstance(node, IndexedSource):  # the length of a user's sequence
            values.append(node.cardinality())
        with self._within(is_function=False):
            return _hash(type(node).__qualname__, *map(self.of, values))

    def _of_function(self, function: types.FunctionType) -> bytes:
        with self._within(is_function=True):
            return super()._of_function(function)

    @contextmanager
    def _within(self, *, is_function: bool) -> Iterator[None]:
        before, self._is_in_function = self._is_in_function, is_function
        try:
            yield
        finally:
            self._is_in_function = before

    def _of_items(self, value: Any) -> bytes:
        if self._is_in_function and not isinstance(value, tuple | frozenset):
            # Functions fill lists and dicts while they run, for example to number words.
            return _hash("mutable", type(value).__qualname__)
        items: Any = value
        if isinstance(value, dict):
            items = sorted(value.items(), key=lambda pair: repr(pair[0]))
        elif isinstance(value, set | frozenset):
            items = sorted(value, key=repr)
        name, count = type(value).__qualname__, min(_MOST_ITEMS_OF_LIST, self._items_left)
        if count == 0 or not items:
            return _hash(name, str(len(items)))
        chosen = items[:: -(-len(items) // count)]
        self._items_left -= len(chosen)
        if isinstance(value, dict):
            chosen = [each for pair in chosen for each in pair]
        elif set(map(type, chosen)) <= _NUMBERS:  # 20 times as fast as one hash for each
            with suppress(ValueError):  # an integer of more than 4,300 digits has no text
                return _hash(name, str(len(items)), repr(chosen))
        hashes = list(map(self.of, chosen))
        if isinstance(value, set | frozenset):
            hashes.sort()  # objects may have an address in the text by which they are sorted
        return _hash(name, str(len(items)), *hashes)

    def _of_array(self, array: np.ndarray[Any, Any]) -> bytes:
        return _hash_array(array, self._take_bytes(array.nbytes))

    def _globals_of(self, function: types.FunctionType) -> list[tuple[str, Any]]:
        return []

    def _of_class(self, cls: type) -> bytes:
        return _hash("class", cls.__qualname__)

    def _of_pickled(self, value: Any) -> bytes:
        kind = type(value)
        if isinstance(value, np.ndarray):  # of objects, such as text
            shape = (repr(value.dtype), repr(value.shape))
            return _hash("array", *shape, self.of(tuple(value.reshape(-1).tolist())))
        if isinstance(value, _REDUCED) or _is_description(value):
            return super()._of_pickled(value)
        if isinstance(value, enum.Enum):
            return _hash("enum", kind.__qualname__, value.name)
        if isinstance(value, types.MethodType):
            return _hash("method", self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, types.BuiltinFunctionType):  # or a method, such as get of a dict
            return _hash("builtin", value.__qualname__, self.of(value.__self__))
        if isinstance(value, np.ufunc):
            return _hash("ufunc", value.__name__)
        # An object with __call__, or a decorated function, such as one of functools.cache.
        code = [inspect.getattr_static(value, name, None) for name in ("__call__", "__wrapped__")]
        functions = [each for each in code if isinstance(each, types.FunctionType)]
        return _hash("object", kind.__qualname__, *map(self.of, functions))

    def _take_bytes(self, nbytes: int) -> int:
        """Return how many bytes of an array or text are hashed."""
        if self._bytes_left <= 0:
            return min(nbytes, _BYTES_OF_REST)
        counted = min(nbytes, _MOST_BYTES_OF_ARRAY)
        self._bytes_left -= counted
        return counted


def _fields(node: Node) -> list[Any]:
    """Return the values of a node's fields that decide its elements."""
    # Nodes of other packages read from a data service: they hold connections that are not shown.
    own = type(node).__module__.startswith(f"{__package__}.")
    fields = dataclasses.fields(node)  # type: ignore[arg-type]
    return [getattr(node, each.name) for each in fields if each.compare and (own or each.repr)]


def _with_nodes_below(node: Node) -> list[Node]:
    """Return a node and the nodes below it, in fields, each before those below it."""
    found, seen = [node], {id(node)}
    for each in found:
        if IDENTITY in vars(each):
            continue
        for value in each.identity_values():
            for below in value if isinstance(value, tuple) else (value,):
                if isinstance(below, Node) and id(below) not in seen:
                    seen.add(id(below))
                    found.append(below)
    return found


def _is_description(value: Any) -> bool:
    """Return whether an object belongs to the description of a dataset."""
    own = type(value).__module__.startswith(f"{__package__}.")
    return own and not isinstance(value, ElementIterator)


def _names(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that code and the code within it use."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _plain_members(value: Any) -> Iterable[Any]:
    """Return the functions and constants of a class's attribute."""
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if each is not None]
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return [value] if type(value) in (types.FunctionType, *_PLAIN) else []


def _file_of(cls: type) -> str:
    """Return the file of a class's module, empty for a script's."""
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "__main__":
        return ""
    return getattr(module, "__file__", None) or "<built-in>"


def _is_installed(file: str) -> bool:
    return file.startswith(("<frozen", "<built-in", *_folders_of_packages()))


@functools.cache
def _folders_of_packages() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({os.path.join(paths[name], "") for name in names})


def _hash(kind: str, *parts: str | bytes) -> bytes:
    found = hashlib.sha256()
    for part in (kind, *parts):
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()


def _hash_array(array: np.ndarray[Any, Any], nbytes: int) -> bytes:
    """Hash an array, or if it has more than ``nbytes`` bytes, blocks spread evenly over it."""
    found = hashlib.sha256(_hash("array", repr(array.dtype), repr(array.shape)))
    # A flat view; of an array that is not contiguous, reshape would make a copy.
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    block = max(1, min(_BLOCK, nbytes) // max(1, array.itemsize))
    blocks = -(-array.size // block)
    if array.nbytes > nbytes:
        blocks = max(1, nbytes // (block * array.itemsize))
        starts = [n * (array.size - block) // max(1, blocks - 1) for n in range(blocks)]
    else:
        starts = [n * block for n in range(blocks)]
    for start in starts:
        found.update(flat[start : start + block].tobytes())
    return found.digest()
