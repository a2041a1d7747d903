"""``Dataset.filter``: the elements that a function wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.functions import call, name_of
from dataservice.dataset.node import (
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)
from mpidist.errors import InvalidArgumentError

_BOOLS = (bool, np.bool_)


@dataclass(frozen=True)
class Filter(UnaryNode):
    """Attributes: the node below, and what says whether an element stays."""

    parent: Node
    predicate: Callable[..., Any]

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return FilterIterator(self.parent.iterate(context), self.predicate)


class FilterIterator(UnaryIterator):
    """One pass; has no state of its own."""

    def __init__(self, parent: ElementIterator, predicate: Callable[..., Any]) -> None:
        super().__init__(parent)
        self._predicate = predicate

    def __next__(self) -> Any:
        while True:
            element = next(self._parent)
            answer = call(self._predicate, element, "filter")
            if answer if isinstance(answer, _BOOLS) else self._as_bool(answer):
                return element

    def _as_bool(self, answer: Any) -> bool:
        answer = tree.on_host(answer)
        if isinstance(answer, int) or hasattr(answer, "__array__"):
            array = np.asarray(answer)
            if array.ndim == 0 and array.dtype.kind in "biu":
                return bool(array)
        raise InvalidArgumentError(
            f"the function {name_of(self._predicate)} given to filter gave {answer!r}: it must "
            "return a bool"
        )
