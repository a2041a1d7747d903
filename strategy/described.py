"""Describe functions and objects in a text that is the same in all processes."""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import os
import random
import re
import sys
import sysconfig
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_VALUES = (str, bytes, int, float, complex, types.NoneType, types.EllipsisType)
# These alone form no cycles. One process may share an object where another has two equal objects.
_UNNUMBERED = (tuple, frozenset, functools.partial, types.MethodType, memoryview, *_VALUES)
_OWN_PACKAGES = {"mpidist", "strategy", "dataservice"}
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
# The __reduce__ of other packages may differ between processes, such as in numba's UUIDs.
_REDUCIBLE = {"numpy", *sys.stdlib_module_names}


def described(value: Any) -> str:
    """Describe a function or object, including everything that its results depend on.

    Two processes get the same text for objects that the same code has made from equal values, and
    different texts if code or values differ. A checksum describes code. It depends on the constants
    of the code and on the globals that the code uses:

    * a function by its name, its code, its attributes, its defaults and the captured values,
    * a class by its name and by the code of its methods, its class attributes and its base classes,
    * another object by its class and attributes.

    Classes and globals of the standard library and of installed packages are described by their
    names alone, because they are the same on all workers.

    Args:
        value: The function or object, often a learning rate schedule.

    Returns:
        The text; one line unless a ``__repr__`` of an installed package has several.
    """
    return _Description({}).text(value)


class _Description:
    """A writer that describes each function, class and mutable object once.

    Later occurrences are numbers, so cycles end, and graphs of functions take linear time.

    Args:
        seen: The numbers and objects, by id. The objects are kept alive, so ids stay unique.
    """

    def __init__(self, seen: dict[int, tuple[int, Any]]) -> None:
        self._seen = seen

    def text(self, value: Any) -> str:
        """Describe one object in one line."""
        own = type(value)
        if own in _VALUES:
            return repr(value)
        if id(value) in self._seen:
            name = getattr(value, "__qualname__", "") if isinstance(value, _CODED) else ""
            return f"{name}#{self._seen[id(value)][0]}"
        if not isinstance(value, _UNNUMBERED):
            self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, type) or not _is_users(own.__module__):
            return self._content(value)
        parts = [self.text(own), self._content(value), self._attributes(value)]
        return " ".join([part for part in parts if part not in ("", "None", "{}")])

    def _alone(self, value: Any) -> str:
        """Describe a member of an unordered collection, independent of the other members."""
        return _Description(dict(self._seen)).text(value)

    def _content(self, value: Any) -> str:
        match value:
            case functools.partial():
                parts = [self.text(each) for each in (value.func, *value.args, value.keywords)]
                return f"partial({', '.join(parts)})"
            case types.MethodType():
                return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
            case types.FunctionType():
                return self._function(value)
            case classmethod() | staticmethod():
                return f"{type(value).__name__} {self.text(value.__func__)}"
            case property():
                return f"property {self.text((value.fget, value.fset, value.fdel))}"
            case types.ModuleType() if _is_users(value.__name__):
                return value.__name__.rpartition(".")[2]
            case types.ModuleType():
                return value.__name__
            case np.ndarray() if not value.dtype.hasobject:
                return f"{value.dtype}{list(value.shape)} {_checksum(value.tobytes())}"
            case memoryview():
                content = f"{value.format}{list(value.shape or ())} {_checksum(value.tobytes())}"
                return f"memoryview {content}"
            case dict():
                return self._mapping(value)
            case set() | frozenset():
                return f"{{{', '.join(sorted(map(self._alone, value)))}}}"
            case list() | tuple():
                return f"[{', '.join(map(self.text, value))}]"
            case np.ndarray():
                return f"{list(value.shape)} {self.text(value.ravel().tolist())}"
            case type() if _is_users(value.__module__):
                return f"{value.__qualname__} (code {_checksum(' '.join(self._class(value)))})"
            case type():
                return f"{value.__module__}.{value.__qualname__}"
            case logging.Logger():
                return "Logger"  # its level may differ, but changes no result
            case random.Random() | np.random.RandomState() | np.random.Generator():
                return f"{_base(type(value)).__qualname__} (state {self._generator(value)})"
            case np.random.BitGenerator():
                return f"{type(value).__qualname__} (state {self._generator(value)})"
        return self._object(value)

    def _mapping(self, value: Mapping[Any, Any]) -> str:
        items = sorted([(self._alone(key), number) for number, key in enumerate(value)])
        values = list(value.values())
        return f"{{{', '.join([f'{key}: {self.text(values[number])}' for key, number in items])}}}"

    def _function(self, function: types.FunctionType) -> str:
        code = " ".join(self._code(function.__code__, _globals(function)))
        known = (*_captured(function), *(function.__defaults__ or ()))
        more = (function.__kwdefaults__ or {}, _without_special(vars(function)))
        parts = [self.text(each) for each in (*known, *[each for each in more if each])]
        return " ".join([f"{function.__qualname__} (code {_checksum(code)})", *parts])

    def _code(self, code: types.CodeType, known: Mapping[str, Any]) -> Iterator[str]:
        """Yield the parts of a function's code, including the constants and globals in use."""
        yield code.co_code.hex()
        yield code.co_exceptiontable.hex()
        yield f"{code.co_argcount} {code.co_kwonlyargcount} {code.co_flags}"
        yield from code.co_names
        loads = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
        used = {each.argval for each in dis.get_instructions(code) if each.opname in loads}
        for name in sorted(used & known.keys()):
            if not _is_special(name):  # such as __name__, which depends on the import path
                yield f"{name}={self._global(known[name], frozenset(code.co_names))}"
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant, known)
            else:
                yield self.text(constant)

    def _global(self, value: Any, names: frozenset[str]) -> str:
        """Describe a global. For a user's module, describe the attributes that the code may use."""
        if not isinstance(value, types.ModuleType) or not _is_users(value.__name__):
            return self.text(value)
        used = sorted(names & vars(value).keys())
        parts = [f"{name}={self._global(vars(value)[name], names - {name})}" for name in used]
        return f"module({', '.join(parts)})"

    def _class(self, value: type) -> Iterator[str]:
        yield from map(self.text, value.__bases__)
        if _is_users(type(value).__module__):
            yield self.text(type(value))
        for name, each in sorted(vars(value).items()):
            # Python, abc, enum and dataclasses keep derived values under special names.
            coded = callable(each) or isinstance(each, _CODED)
            if (coded or not _is_special(name)) and not name.startswith("__annotat"):
                yield f"{name}={self.text(each)}"

    def _generator(self, value: Any) -> str:
        """Return a checksum of the state of a random number generator."""
        match value:
            case random.SystemRandom():
                return "of the system"
            case random.Random():
                state: Any = value.getstate()
            case np.random.RandomState():
                state = value.get_state(legacy=False)
            case np.random.Generator():
                state = (type(value.bit_generator).__name__, value.bit_generator.state)
            case _:
                state = value.state
        return _checksum(self.text(state))

    def _object(self, value: Any) -> str:
        """Describe an object by the ``__repr__`` of an installed class, or by its attributes."""
        own = _base(type(value))
        default: Any = object.__repr__  # shows the address of the object
        represent: Any = own.__repr__
        if represent is default:
            if own is object and type(value) is not object:
                return ""  # a user's class: its attributes follow
            wrapped = inspect.getattr_static(value, "__wrapped__", None)
            content = self._attributes(value) if wrapped is None else self.text(wrapped)
            return f"{own.__qualname__}({content})"
        function = inspect.getattr_static(value, "py_func", None)  # compiled by numba
        if isinstance(function, types.FunctionType):
            return f"{own.__qualname__}({self.text(function)})"
        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):  # show whole arrays
            text = represent(value)
        if own is type(value) and _ADDRESS.search(text) and _root(own.__module__) in _REDUCIBLE:
            try:
                reduced: Any = value.__reduce_ex__(2)
            except Exception:
                return _ADDRESS.sub("0x", text)  # for example of a lock
            if not isinstance(reduced, str):
                made, *rest = reduced
                content = self.text([each if _is_plain(each) else list(each) for each in rest])
                return f"{own.__qualname__}({self.text(made)} {content})"
        return _ADDRESS.sub("0x", text)

    def _attributes(self, value: Any) -> str:
        state = object.__getstate__(value)
        return self.text(_without_special(state) if isinstance(state, dict) else state)


_CODED = (types.FunctionType, type, classmethod, staticmethod, property)


def _base(own: type) -> type:
    """Return the class. For a user's class, return the installed base with its ``__repr__``."""
    if not _is_users(own.__module__):
        return own
    return next(
        each
        for each in own.__mro__
        if each is object or ("__repr__" in vars(each) and not _is_users(each.__module__))
    )


def _is_users(module: str | None) -> bool:
    """Return whether a module belongs to the program, and not to an installed package."""
    root = _root(module)
    if root == "__main__":
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if root in _OWN_PACKAGES or (file is None and root in sys.stdlib_module_names):
        return False
    return file is None or not _is_installed(file)


def _is_installed(file: str) -> bool:
    parts = (_STANDARD_LIBRARY, "<frozen ")
    return file.startswith(parts) or _INSTALLED.search(file) is not None


def _root(module: str | None) -> str:
    return str(module).partition(".")[0]


def _globals(function: types.FunctionType) -> Mapping[str, Any]:
    """Return the globals of a function; empty for functions of installed packages."""
    installed = _is_installed(function.__code__.co_filename)
    return {} if installed or _root(function.__module__) in _OWN_PACKAGES else function.__globals__


def _captured(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable is not assigned, or was deleted
            yield "no value"


def _is_special(name: str) -> bool:
    return name.startswith("_") and name.endswith("_")


def _without_special(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Remove attributes such as ``__module__``, which depends on the import path."""
    kept = {name for name in attributes if not _is_special(name)} | {"__wrapped__"}
    return {name: each for name, each in attributes.items() if name in kept}


def _is_plain(part: Any) -> bool:
    """Return whether a part of the result of ``__reduce__`` is not an iterator."""
    return not hasattr(part, "__next__")


def _checksum(content: str | bytes) -> str:
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return f"{zlib.crc32(data):08x}"
