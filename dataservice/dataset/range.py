"""``Dataset.range``: whole numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataservice.dataset.node import IndexedSource
from dataservice.dataset.spec import ArraySpec, Spec

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Range(IndexedSource):
    """The numbers of a Python range, as np.int64.

    Attributes:
        start: The first.
        stop: Where to end, exclusive.
        step: The distance.
    """

    start: int
    stop: int
    step: int

    def __post_init__(self) -> None:
        numbers = range(self.start, self.stop, self.step)
        ends = (numbers[0], numbers[-1]) if numbers else ()
        if not all(_LOWEST <= end <= _HIGHEST for end in ends) or numbers[_HIGHEST:]:
            raise ValueError(f"{numbers}: all numbers and their count must fit into 64 bits")

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return len(range(self.start, self.stop, self.step))

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return ArraySpec((), np.int64)

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`."""
        return True

    def element(self, index: int) -> np.int64:
        """Local. See :class:`IndexedSource`."""
        return np.int64(self.start + index * self.step)
