"""How long each node of a pass takes."""

from __future__ import annotations

import time
from typing import Any

from dataservice.dataset.node import ElementIterator, Node


class StageTimes:
    """Times of the nodes of a pass, of one in so many elements that come out of it.

    Attributes:
        on: Whether the element that is being made is one of those; who makes elements says so.
    """

    def __init__(self) -> None:
        self.on = False
        self._spent: dict[int, tuple[Node, list[float]]] = {}

    def watch(self, node: Node, elements: ElementIterator) -> ElementIterator:
        """Local. See :class:`Stages`."""
        # A node below repeat has many passes.
        _, spent = self._spent.setdefault(id(node), (node, [0.0]))
        return TimedIterator(elements, self, spent)

    def own_seconds(self) -> list[tuple[str, float]]:
        """Local. Each node's name, and the seconds spent in it alone, from the sources on.

        What runs beside it, as below ``prefetch``, counts where it runs.
        """
        # A copy, because the pass goes on and may meet new nodes.
        known = [*self._spent.values()]
        known.sort(key=lambda each: _depth(each[0]))
        result = []
        for node, spent in known:
            below = (self._spent.get(id(each)) for each in _below(node))
            seconds = spent[0] - sum(each[1][0] for each in below if each is not None)
            result.append((type(node).__name__.lower(), max(seconds, 0.0)))
        return result


def _below(node: Node) -> tuple[Node, ...]:
    """The nodes that a node is over."""
    parent = getattr(node, "parent", None)
    return getattr(node, "parents", ()) if parent is None else (parent,)


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, _below(node)), default=0)


class TimedIterator(ElementIterator):
    """A pass whose time is taken.

    Args:
        elements: The pass.
        times: Says whether to.
        spent: Where to add the seconds.
    """

    def __init__(self, elements: ElementIterator, times: StageTimes, spent: list[float]) -> None:
        self._elements = elements
        self._times = times
        self._spent = spent

    def __next__(self) -> Any:
        if not self._times.on:
            return next(self._elements)
        began = time.perf_counter()
        try:
            return next(self._elements)
        finally:
            self._spent[0] += time.perf_counter() - began

    def get_state(self) -> Any:
        """Local. See :class:`ElementIterator`."""
        return self._elements.get_state()

    def set_state(self, state: Any) -> None:
        """Local. See :class:`ElementIterator`."""
        self._elements.set_state(state)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._elements.close()
