"""``Dataset.counter``: whole numbers without an end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dataservice.dataset.context import Context
from dataservice.dataset.endless import Endless


@dataclass(frozen=True)
class Counter(Endless):
    """Attributes: the first number, and the distance from each to the next."""

    start: int
    step: int

    def basis(self, context: Context) -> tuple[int, ...]:
        """Local. See :class:`Endless`."""
        return self.start, self.step

    def numbers(self, basis: tuple[int, ...]) -> Callable[[int], np.int64]:
        """Local. See :class:`Endless`."""
        start, step = basis
        return lambda place: np.int64(start + place * step)
