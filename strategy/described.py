"""Describe functions and objects in a text that is the same in all processes."""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


def described(value: Any, around: tuple[int, ...] = ()) -> str:
    """Describe a function, or a value that it uses. Pure.

    Two processes get the same text for what they made by the same code from equal values, and
    different texts for what differs in code or values. A function is described by its name, the
    values that it captures, its defaults, and a checksum of its code with the globals that this
    uses; an object whose class has no ``__repr__`` by its class and attributes.

    Args:
        value: The function, often a learning rate schedule.
        around: The ids of the values that this one is in.

    Returns:
        The text; one line unless a ``__repr__`` has several.
    """
    if id(value) in around:
        return "..."
    inner = functools.partial(described, around=(*around, id(value)))
    match value:
        case functools.partial():
            parts = [inner(each) for each in (value.func, *value.args, value.keywords)]
            return f"partial({', '.join(parts)})"
        case types.MethodType():
            return f"{inner(value.__func__)} of {inner(value.__self__)}"
        case types.FunctionType():
            known = (*_captured(value), *(value.__defaults__ or ()), value.__kwdefaults__ or {})
            text = " ".join(_code(value.__code__, value.__globals__, inner))
            parts = [inner(each) for each in known if each != {}]
            return " ".join([value.__qualname__, *parts, f"(code {zlib.crc32(text.encode()):08x})"])
        case types.ModuleType():
            return value.__name__
        case np.ndarray() if value.dtype != object:
            return f"{value.dtype}{list(value.shape)} {zlib.crc32(value.tobytes()):08x}"
        case dict():
            items = sorted([f"{inner(key)}: {inner(each)}" for key, each in value.items()])
            return f"{{{', '.join(items)}}}"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(inner, value)))}}}"
        case list() | tuple() | np.ndarray():
            return f"[{', '.join(map(inner, value))}]"
        case type():
            return f"{value.__module__}.{value.__qualname__}"
    default: Any = object.__repr__  # it has the address of the object
    if type(value).__repr__ is not default:
        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):  # all of its arrays
            return _ADDRESS.sub("0x", repr(value))
    return f"{type(value).__qualname__}({inner(object.__getstate__(value))})"


def _captured(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet, or none any more
            yield "no value"


def _code(
    code: types.CodeType, known: dict[str, Any], inner: Callable[[Any], str]
) -> Iterator[str]:
    """The parts of a function's code, with the constants and globals that it uses."""
    yield code.co_code.hex()
    yield from code.co_names
    used = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    yield from [f"{name}={inner(known[name])}" for name in sorted(used & known.keys())]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant, known, inner)
        else:
            yield inner(constant)
