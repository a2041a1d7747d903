"""A dataset of which only the dispatcher has the description."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node
from dataservice.dataset.spec import Spec
from mpidist.errors import UnimplementedError


@dataclass(frozen=True)
class Registered(Node):
    """Stands below a Distributed node for what workers evaluate.

    Attributes:
        name: What the dispatcher calls it.
        text: Its description.
        count: Its cardinality.
        length: The number of its source indices; -1 if it cannot be split.
        spec: What its elements are like; None if that is not known.
    """

    name: str
    text: str
    count: int = field(repr=False)
    length: int = field(repr=False)
    spec: Any = field(repr=False)

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return self.count

    def source_length(self) -> int:
        """Return the number of source indices; see :class:`Node`."""
        if self.length < 0:
            raise self.cannot_be_split("its parts depend on each other")
        return self.length

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        if self.spec is None:
            raise ValueError(
                f"the element_spec of {self.summary()} is not known: give element_spec to "
                "from_dataset_id()"
            )
        return self.spec

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        return self.text

    def _iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`; UnimplementedError, because it is elsewhere."""
        raise UnimplementedError(f"{self.summary()} can only be read through its data service")
