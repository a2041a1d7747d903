"""``Dataset.enumerate``: elements with their numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node, Place, Reader, UnaryIterator, UnaryNode
from dataservice.dataset.spec import ArraySpec, Spec


@dataclass(frozen=True)
class Enumerate(UnaryNode):
    """Attributes: the node below, and the first number."""

    parent: Node
    start: int

    def indexed_length(self) -> int | None:
        """Return the length of the node below; see :class:`Node`."""
        return self.parent.indexed_length()

    def source_length(self) -> int:
        """Return the number of elements; see :class:`Node`."""
        return self.indexed_only()

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return ArraySpec((), np.int64), self.parent.element_spec()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _EnumerateReader(self, places, context)

    def _iterate(self, context: Context) -> ElementIterator:
        return EnumerateIterator(self.parent.iterate(context), self.start)


class _EnumerateReader(Reader):
    def __init__(self, node: Enumerate, places: Iterator[Place], context: Context) -> None:
        # The node below may take places ahead, on another thread.
        self._taken: deque[int] = deque()
        self._start = node.start
        self._parent = node.parent.read(_noted(places, self._taken), context)

    def __next__(self) -> tuple[np.int64, Any]:
        try:
            element = next(self._parent)
        except StopIteration:
            raise
        except Exception:
            self._taken.popleft()
            raise
        return np.int64(self._start + self._taken.popleft()), element

    def close(self) -> None:
        self._parent.close()


def _noted(places: Iterator[Place], taken: deque[int]) -> Iterator[Place]:
    """Yield places, and append their indices to a queue."""
    for place in places:
        taken.append(place[1])
        yield place


class EnumerateIterator(UnaryIterator):
    """One pass."""

    def __init__(self, parent: ElementIterator, start: int) -> None:
        super().__init__(parent)
        self._number = start

    def __next__(self) -> tuple[np.int64, Any]:
        self._number += 1  # also where the element fails, which had its number
        return np.int64(self._number - 1), next(self._parent)

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._number, super().get_state()

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._number, below = state
        super().set_state(below)
