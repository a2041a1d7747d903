"""``Dataset.scan``: what a function makes of a state and each element in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.functions import call, name_of
from dataservice.dataset.node import ElementIterator, Node, UnaryIterator, UnaryNode
from dataservice.dataset.spec import Spec, spec_of
from mpidist.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Scan(UnaryNode):
    """Goes from state to state, and gives an element at each step.

    Attributes:
        parent: The node below.
        initial_state: The state before the first element.
        function: Makes of a state and an element the next state and what to give.
    """

    parent: Node
    initial_state: Any = field(repr=False)
    function: Callable[[Any, Any], Any]

    @classmethod
    def of(cls, parent: Node, initial_state: Any, function: Callable[[Any, Any], Any]) -> Scan:
        """Local. Take a copy of the state, which the caller may change."""
        return cls(parent, _own(initial_state), function)

    def source_length(self) -> int:
        """Raise UnimplementedError; see :class:`Node`."""
        raise self.cannot_be_split("each would have a state of its own")

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return spec_of(self.first())

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`; only what functions make says what elements are."""
        return False

    def _iterate(self, context: Context) -> ElementIterator:
        return ScanIterator(self, context)


class ScanIterator(UnaryIterator):
    """One pass; its copy of the state is changed by nobody, whatever becomes of the elements."""

    def __init__(self, node: Scan, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._function = node.function
        self._state = node.initial_state

    def __next__(self) -> Any:
        result = call(self._function, (tree.opened(self._state), next(self._parent)), "scan")
        if not isinstance(result, tuple) or len(result) != 2 or result[1] is None:
            raise InvalidArgumentError(
                f"the function {name_of(self._function)} given to scan returned {result!r}: it "
                "must return a state and an element"
            )
        state, element = result
        self._state = _own(state)
        return tree.to_numpy(element)

    def get_state(self) -> tuple[Any, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._state, super().get_state()

    def set_state(self, state: tuple[Any, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        own, below = state
        self._state = _own(own)  # unpickled arrays can be written into
        super().set_state(below)


def _own(state: Any) -> Any:
    copy = tree.map_leaves(
        lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree.to_numpy(state)
    )
    return tree.read_only(copy)
