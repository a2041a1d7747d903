"""The fingerprint of a dataset: a hash of its operations, functions, constants and arrays."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

from dataservice.dataset.base import Node

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_OWN_PACKAGE = f"{__package__.partition('.')[0]}."
# Elements of an array that are hashed at once: they are copied.
_BLOCK = 1 << 20


def fingerprint(node: Node) -> int:
    """Return a hash of 64 bits, equal in every process that describes the same dataset.

    Functions are hashed by their code, defaults, captured values, and the globals that they name.
    Functions and classes of installed packages are hashed without the globals, because those can be
    a large part of the package.

    Raises:
        TypeError: An object that the dataset refers to cannot be pickled.
    """
    return int.from_bytes(_Hashes().of(node)[:8], "little")


class _Hashes:
    """Computes hashes of objects; each object is hashed once."""

    def __init__(self) -> None:
        # The objects are kept: the id of one that is freed could be that of another.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def of(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value))
        if id(value) not in self._known:
            self._known[id(value)] = value, _hash("an object that contains itself")
            self._known[id(value)] = value, self._of_object(value)
        return self._known[id(value)][1]

    def _of_object(self, value: Any) -> bytes:
        kind = type(value)
        if isinstance(value, Node):
            return _hash(kind.__qualname__, *map(self.of, _fields(value)))
        if kind in (tuple, list):
            return _hash(kind.__name__, *map(self.of, value))
        if kind in (set, frozenset):
            return _hash(kind.__name__, *sorted(map(self.of, value)))
        if kind is dict:
            return _hash("dict", *(self.of(each) for pair in value.items() for each in pair))
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return _hash_array(np.asarray(value))
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

    def _of_function(self, function: types.FunctionType) -> bytes:
        if function.__module__.startswith(_OWN_PACKAGE):
            return _hash("function", function.__module__, function.__qualname__)
        parts: list[Any] = [
            function.__code__,
            function.__defaults__,
            function.__kwdefaults__,
            function.__closure__,
        ]
        if not _is_installed(function.__code__.co_filename):
            known = function.__globals__
            parts += [(n, known[n]) for n in sorted(_names(function.__code__)) if n in known]
        return _hash("function", *map(self.of, parts))

    def _of_code(self, code: types.CodeType) -> bytes:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        return _hash("code", code.co_code, *map(self.of, (code.co_consts, names, counts)))

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


def _fields(node: Node) -> list[Any]:
    """Return the values of a node's fields that decide its elements."""
    # Nodes of other packages read from a data service: they hold connections that are not shown.
    own = type(node).__module__.startswith(f"{__package__}.")
    fields = dataclasses.fields(node)  # type: ignore[arg-type]
    return [getattr(node, each.name) for each in fields if each.compare and (own or each.repr)]


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


def _hash_array(array: np.ndarray[Any, Any]) -> bytes:
    found = hashlib.sha256(_hash("array", repr(array.dtype), repr(array.shape)))
    flat = array.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        found.update(flat[start : start + _BLOCK].tobytes())
    return found.digest()
