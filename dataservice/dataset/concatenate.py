"""``Dataset.concatenate``: the elements of one dataset, then those of another."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    ENDLESS,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    Place,
    UnaryNode,
)
from dataservice.dataset.repeat import Repeat
from dataservice.dataset.several import RoutedReader, SeveralNode, merged_spec
from dataservice.dataset.spec import Spec


@dataclass(frozen=True)
class Concatenate(SeveralNode):
    """Attributes: the nodes, in order."""

    parents: tuple[Node, ...]

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        counts = [parent.cardinality() for parent in self.parents]
        if INFINITE_CARDINALITY in counts:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in counts else sum(counts)

    def indexed_length(self) -> int | None:
        """Return the sum of the lengths; see :class:`Node`."""
        lengths = self.lengths()
        return None if lengths is None else min(sum(lengths), ENDLESS)

    def source_length(self) -> int:
        """Return the number of elements, or of source indices of all nodes; see :class:`Node`."""
        length = self.indexed_length()
        if length is not None:
            return length
        if any(_repeats(parent) for parent in self.parents):
            raise self.cannot_be_split("one of its parts is repeated, and only the whole can be")
        return sum(parent.source_length() for parent in self.parents)

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return merged_spec(self.parents)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        lengths = self.lengths()
        assert lengths is not None
        firsts = [0, *itertools.accumulate(lengths)]
        routed = (
            (number := bisect_right(firsts, index) - 1, (epoch, index - firsts[number]))
            for epoch, index in places
        )
        return RoutedReader(self.parents, routed, context)

    def _iterate(self, context: Context) -> ElementIterator:
        return ConcatenateIterator(self.parents, context)


class ConcatenateIterator(ElementIterator):
    """One pass; the passes below begin one after the other."""

    def __init__(self, parents: tuple[Node, ...], context: Context) -> None:
        self._parents = parents
        self._context = context
        self._begun = 0
        self._pass: ElementIterator | None = None

    def __next__(self) -> Any:
        while True:
            if self._pass is None:
                self._begin()
            assert self._pass is not None
            try:
                return next(self._pass)
            except StopIteration:
                self.close()

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._begun, None if self._pass is None else (self._pass.get_state(),)

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._begun, within = state
        if within is not None:
            self._begun -= 1
            self._begin()
            assert self._pass is not None
            self._pass.set_state(within[0])

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return self._pass is not None and self._pass.goes_on(error)

    def _begin(self) -> None:
        if self._begun == len(self._parents):
            raise StopIteration
        parent, context = self._parents[self._begun], self._context.branch(self._begun)
        share = context.share
        if share is not None:
            before = sum(each.source_length() for each in self._parents[: self._begun])
            share = replace(share, offset=share.offset + before)
            context = replace(context, share=share)
        self._begun += 1
        self._pass = parent.iterate(context)


def _repeats(node: Node) -> bool:
    """Return whether passes over a sequential node are several passes over its source."""
    if node.indexed_length() is not None:
        return False
    while isinstance(node, UnaryNode) and not isinstance(node, Repeat):
        node = node.parent
    return isinstance(node, Repeat)
