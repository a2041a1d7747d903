"""How long each node of a pass takes."""

from __future__ import annotations

import threading
import time
from typing import Any

from dataservice.dataset.node import ElementIterator, Node


class StageTimes:
    """Times of the nodes of a pass, of one in so many elements that come out of it.

    Nodes of one kind count together: functions make new ones for every element.

    Attributes:
        on: Whether the element that is being made is one of those; who makes elements says so.
    """

    def __init__(self) -> None:
        self.on = False
        self._stages: dict[str, _Stage] = {}
        self._local = threading.local()

    def watch(self, node: Node, elements: ElementIterator) -> ElementIterator:
        """Local. See :class:`Stages`."""
        name = type(node).__name__.lower()
        stage = self._stages.get(name)
        if stage is None:
            stage = self._stages.setdefault(name, _Stage(_depth(node)))
        return TimedIterator(elements, self, stage)

    def timed(self, stage: _Stage, elements: ElementIterator) -> Any:
        """Local. The next element; the time that it takes, but for that of nodes below, is added.

        What runs beside it, as below ``prefetch``, counts where it runs.
        """
        local = self._local
        outer: float = getattr(local, "below", 0.0)
        local.below, began = 0.0, time.perf_counter()
        try:
            return next(elements)
        finally:
            seconds = time.perf_counter() - began
            stage.seconds += seconds - local.below
            local.below = outer + seconds

    def own_seconds(self) -> list[tuple[str, float]]:
        """Local. The kinds of nodes, and the seconds spent in them alone, from the sources on."""
        # A copy, because the pass goes on and may meet new ones.
        known = [*self._stages.items()]
        known.sort(key=lambda each: each[1].depth)
        return [(name, stage.seconds) for name, stage in known]


class _Stage:
    """Attributes: how many nodes are below the first of a kind, and the seconds spent in all."""

    __slots__ = ("depth", "seconds")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.seconds = 0.0


def _depth(node: Node) -> int:
    parent = getattr(node, "parent", None)
    below: tuple[Node, ...] = getattr(node, "parents", ()) if parent is None else (parent,)
    return 1 + max(map(_depth, below), default=0)


class TimedIterator(ElementIterator):
    """A pass whose time is taken.

    Args:
        elements: The pass.
        times: Says whether to.
        stage: Where to add the seconds.
    """

    def __init__(self, elements: ElementIterator, times: StageTimes, stage: _Stage) -> None:
        self._elements = elements
        self._times = times
        self._stage = stage

    def __next__(self) -> Any:
        if not self._times.on:
            return next(self._elements)
        return self._times.timed(self._stage, self._elements)

    def get_state(self) -> Any:
        """Local. See :class:`ElementIterator`."""
        return self._elements.get_state()

    def set_state(self, state: Any) -> None:
        """Local. See :class:`ElementIterator`."""
        self._elements.set_state(state)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        self._elements.close()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return self._elements.goes_on(error)
