"""Functions of users that make datasets, as ones that make nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataservice.dataset.checks import check_callable
from dataservice.dataset.described import Described
from dataservice.dataset.functions import name_of
from dataservice.dataset.node import Node


def node_of(method: str, name: str, function: Callable[..., Described]) -> Callable[..., Node]:
    """Local. A user's function that makes datasets, as one that makes nodes.

    Args:
        method: Of the dataset.
        name: Of the argument.
        function: What is given.

    Returns:
        A function that can be pickled, and raises TypeError where the user's gives no dataset.

    Raises:
        TypeError: It is no function.
    """
    return _Nodes(check_callable(method, name, function), method)


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


class _Nodes:
    """See :func:`node_of`; a class, so that it can be pickled."""

    def __init__(self, function: Callable[..., Described], name: str) -> None:
        self._function = function
        self._name = name
        self.__qualname__ = name_of(function)

    def __call__(self, *arguments: Any) -> Node:
        dataset = self._function(*arguments)
        if not isinstance(dataset, Described):
            raise TypeError(
                f"the function given to {self._name} returned {type(dataset).__name__}, not a "
                "Dataset"
            )
        return dataset._node
