"""``Dataset.counter``: whole numbers without an end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataservice.dataset.context import Context
from dataservice.dataset.endless import Endless, Numbers


@dataclass(frozen=True)
class Counter(Endless):
    """Attributes: the first number, and the distance from each to the next."""

    start: int
    step: int

    def numbers(self, context: Context, epoch: int) -> Numbers:
        """Return what gives the elements, which are the same in all epochs."""
        start, step = self.start, self.step
        return lambda index: np.int64(start + index * step)
