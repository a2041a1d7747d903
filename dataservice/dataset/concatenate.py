"""``Dataset.concatenate``: the elements of one dataset, then those of another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryNode,
)
from dataservice.dataset.portions import Portion
from dataservice.dataset.repeat import Repeat
from dataservice.dataset.several import SeveralNode, merged_spec
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

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return all(parent.one_to_one for parent in self.parents)

    @property
    def random_access(self) -> bool:
        """Local. See :class:`Node`; passes below begin one after the other."""
        return False

    def source_indices(self) -> range:
        """Local. See :class:`Node`; those of the first node, then those of the next."""
        if any(_repeats(parent) for parent in self.parents):
            raise self.cannot_be_split("one of its parts is repeated, and only the whole can be")
        return range(sum(len(parent.source_indices()) for parent in self.parents))

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return merged_spec(self.parents)

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return ConcatenateIterator(self.parents, context)


class ConcatenateIterator(ElementIterator):
    """One pass; the passes below begin one after the other."""

    def __init__(self, parents: tuple[Node, ...], context: Context) -> None:
        self._parents = parents
        self._context = context
        self._begun = 0
        self._first = 0  # split of the pass that has begun, or is next
        self._portion: Portion | None = None
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

    def get_state(self) -> tuple[int, int, int, Any]:
        """Local. See :class:`ElementIterator`."""
        if self._pass is None:
            if self._context.feed is not None:
                self._context.feed(self._context.passes).mark(self._first)
            return self._begun, self._first, self._first, None
        within = (self._pass.get_state(),)
        # The pass may have come to its end ahead of who reads it, and ask for nothing then.
        following = self._first if self._portion is None else self._portion.following
        return self._begun, self._first, following, within

    def set_state(self, state: tuple[int, int, int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._begun, self._first, following, within = state
        if within is not None:
            self._begun -= 1
            self._begin()
            assert self._pass is not None
            self._pass.set_state(within[0])
            if self._portion is not None:
                self._portion.following = max(self._portion.following, following)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        if self._portion is not None:
            self._first = self._portion.following
            self._portion = None

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return self._pass is not None and self._pass.goes_on(error)

    def _begin(self) -> None:
        if self._begun == len(self._parents):
            raise StopIteration
        parent, context = self._parents[self._begun], self._context.branch(self._begun)
        if context.feed is not None:
            start = sum(len(before.source_indices()) for before in self._parents[: self._begun])
            splits = context.feed(context.passes)
            self._portion = Portion(splits, parent.source_indices(), start, self._first)
            context = replace(context, feed=self._portion.feed)
        self._begun += 1
        self._pass = parent.iterate(context)


def _repeats(node: Node) -> bool:
    while isinstance(node, UnaryNode) and not isinstance(node, Repeat):
        node = node.parent
    return isinstance(node, Repeat)
