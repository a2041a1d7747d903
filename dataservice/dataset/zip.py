"""``Dataset.zip``: one element of each of several datasets, until one of them ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
)
from dataservice.dataset.several import SeveralIterator, SeveralNode
from dataservice.dataset.spec import Spec


@dataclass(frozen=True)
class Zip(SeveralNode):
    """Attributes: the nodes, and the structure of elements, with anything in place of leaves."""

    parents: tuple[Node, ...]
    structure: Any

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        counts = [parent.cardinality() for parent in self.parents]
        finite = [count for count in counts if count != INFINITE_CARDINALITY]
        if 0 in finite:
            return 0
        if UNKNOWN_CARDINALITY in finite:
            return UNKNOWN_CARDINALITY
        return min(finite, default=INFINITE_CARDINALITY)

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return all(parent.one_to_one for parent in self.parents)

    def source_indices(self) -> range:
        """Local. See :class:`Node`; index i stands for element i of each."""
        lengths = [len(parent.source_indices()) for parent in self.parents]
        if not self.one_to_one:
            raise self.cannot_be_split(
                "elements that belong together would go to different workers; call zip before "
                "transformations that drop, reorder, flatten or repeat elements"
            )
        return range(min(lengths))

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        specs = [parent.element_spec() for parent in self.parents]
        return tree.unflatten(self.structure, specs)

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return ZipIterator(self, context)


class ZipIterator(SeveralIterator):
    """One pass."""

    def __init__(self, node: Zip, context: Context) -> None:
        super().__init__(lambda: node.begin(context))
        self._structure = node.structure
        self._over = False

    def __next__(self) -> Any:
        if self._over:  # those that are longer have more
            raise StopIteration
        elements, failed = [], None
        for each in self._passes:
            try:
                elements.append(next(each))
            except StopIteration:
                self._over = True
                raise
            except Exception as error:  # the others go on too, to stay in step
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback refers to this frame
        return tree.unflatten(self._structure, elements)

    def get_state(self) -> tuple[bool, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._over, super().get_state()

    def set_state(self, state: tuple[bool, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._over, below = state
        super().set_state(below)
