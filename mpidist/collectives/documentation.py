"""Documentation of functions, from the methods that do their work."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from mpidist.group import ProcessGroup

Function = TypeVar("Function", bound=Callable[..., Any])

# Arguments that no method has.
_OWN = {
    "group": "The group; without it the default group, of all ranks.",
    "device": "Not needed; torch's argument.",
    "device_ids": "Not needed; torch's argument.",
    "use_batch": "Not needed; torch's argument.",
}
_OUTSIDERS = (
    "On a rank that is no member of the group nothing is done, but for a warning; gives {}."
)


def as_method(function: Function) -> Function:
    """Local. Give a function the documentation of the group's method of its name.

    Args:
        function: Takes what the method takes, in the method's order, and perhaps other names.
    """
    method = getattr(ProcessGroup, function.__name__)
    text = inspect.getdoc(method)
    if text is None:  # python -OO
        return function
    names = list(inspect.signature(function).parameters)
    theirs = list(inspect.signature(method).parameters)[1:]
    ours = [name for name in names if name not in _OWN]
    for their, our in zip(theirs, ours, strict=False):
        text = re.sub(rf"(?m)^    {their}:", f"    {our}:", text)
        text = text.replace(f"``{their}``", f"``{our}``")
    for their in theirs[len(ours) :]:
        text = re.sub(rf"(?m)^    {their}:.*\n(        .*\n)*", "", text)
    gives = inspect.signature(function).return_annotation
    outsiders = _OUTSIDERS.format("-1" if gives == "int" else "None")
    own = "\n".join(f"    {name}: {_OWN[name]}" for name in names if name in _OWN)
    before, _, after = text.partition("\nArgs:\n")
    entries, blank, rest = after.partition("\n\n")
    entries = f"{entries}\n{own}" if entries else own
    function.__doc__ = f"{before.rstrip()}\n\nArgs:\n{entries}{blank}{rest}\n\n{outsiders}"
    return function
