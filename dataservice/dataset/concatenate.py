"""``Dataset.concatenate``: the elements of one dataset, then those of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    Node,
)
from dataservice.dataset.several import SeveralNode
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

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        empty = [parent.cardinality() == 0 for parent in self.parents]
        return self.parents[empty.index(False) if False in empty else 0].element_spec()

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
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
        begun, within = state
        self._begun = begun
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

    def _begin(self) -> None:
        if self._begun == len(self._parents):
            raise StopIteration
        self._begun += 1
        self._pass = self._parents[self._begun - 1].iterate(self._context)
