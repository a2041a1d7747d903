"""Calling the functions that users give. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataservice.dataset.node import Node


def name_of(function: Callable[..., Any]) -> str:
    """Local. What a function is called in messages."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def call(function: Callable[..., Any], element: Any, whose: str) -> Any:
    """Local. What a user's function makes of an element.

    Args:
        function: Gets the element, or the members of a tuple as its arguments.
        element: The element.
        whose: The transformation's name, for messages.

    Raises:
        RuntimeError: It raised StopIteration, which would pass for the end of the sequence, and
            elements would be missing silently.
        Exception: What it raises.
    """
    try:
        return function(*element) if type(element) is tuple else function(element)
    except StopIteration as error:
        raise RuntimeError(f"the function given to {whose} raised StopIteration") from error


class Samples:
    """A function that makes the samples of the nodes that another function makes.

    Args:
        function: The other function.
    """

    def __init__(self, function: Callable[..., Node]) -> None:
        self._function = function
        self.__qualname__ = name_of(function)

    def __call__(self, *arguments: Any) -> Node:
        """Return the sample of the node that the other function makes."""
        return self._function(*arguments).sample()
