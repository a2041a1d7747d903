"""Sources that never end, and know each of their elements by its number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from dataservice.dataset.context import Context
from dataservice.dataset.node import INFINITE_CARDINALITY, ElementIterator, Node
from dataservice.dataset.source import SplitReader, splits_of
from dataservice.dataset.spec import ArraySpec, Spec


class Endless(Node):
    """A source of whole numbers, as np.int64, without an end."""

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return INFINITE_CARDINALITY

    def source_indices(self) -> range:
        """Local. See :class:`Node`; it is one index, because one worker makes all elements."""
        return range(1)

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return ArraySpec((), np.int64)

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`."""
        return True

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return EndlessIterator(self, context)

    @abstractmethod
    def basis(self, context: Context) -> tuple[int, ...]:
        """Local. What the elements of a pass depend on; it is a part of the pass's state."""

    @abstractmethod
    def numbers(self, basis: tuple[int, ...]) -> Callable[[int], np.int64]:
        """Local. What makes the elements of a pass, each of its place in the sequence."""


class EndlessIterator(ElementIterator):
    """One pass, of whoever gets the index."""

    def __init__(self, node: Endless, context: Context) -> None:
        self._node = node
        self._basis = node.basis(context)
        self._numbers = node.numbers(self._basis)
        self._indices = SplitReader(splits_of(node, context))
        self._place: int | None = None  # of the next element; None before the index is had

    def __next__(self) -> np.int64:
        if self._place is None:
            self._indices.next()
            self._place = 0
        self._place += 1
        return self._numbers(self._place - 1)

    def get_state(self) -> tuple[Any, tuple[int, ...], int | None]:
        """Local. See :class:`ElementIterator`."""
        return self._indices.get_state(), self._basis, self._place

    def set_state(self, state: tuple[Any, tuple[int, ...], int | None]) -> None:
        """Local. See :class:`ElementIterator`."""
        indices, self._basis, self._place = state
        self._numbers = self._node.numbers(self._basis)
        self._indices.set_state(indices)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
