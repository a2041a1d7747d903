"""Sources of whole numbers without an end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    ENDLESS,
    INFINITE_CARDINALITY,
    ElementIterator,
    Node,
    Place,
    Reader,
)
from dataservice.dataset.spec import ArraySpec, Spec

Numbers = Callable[[int], np.int64]
"""Gives the element of an index."""


class Endless(Node):
    """A source of whole numbers, as np.int64, without an end."""

    def cardinality(self) -> int:
        """Return INFINITE_CARDINALITY."""
        return INFINITE_CARDINALITY

    def indexed_length(self) -> int | None:
        """Return ENDLESS; see :class:`Node`."""
        return ENDLESS

    def element_spec(self) -> Spec:
        """Return the spec of a number."""
        return ArraySpec((), np.int64)

    @property
    def has_static_spec(self) -> bool:
        """Whether element_spec is known without an element: True."""
        return True

    @abstractmethod
    def numbers(self, context: Context, epoch: int) -> Numbers:
        """Return what gives the elements of an epoch."""

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return _EndlessReader(self, places, context)


class _EndlessReader(Reader):
    def __init__(self, node: Endless, places: Iterator[Place], context: Context) -> None:
        self._node = node
        self._places = places
        self._context = context
        self._epoch: int | None = None
        self._numbers: Numbers

    def __next__(self) -> np.int64:
        epoch, index = next(self._places)
        if epoch != self._epoch:
            self._numbers, self._epoch = self._node.numbers(self._context, epoch), epoch
        return self._numbers(index)
