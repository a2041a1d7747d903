"""``Dataset.random``: random whole numbers without an end."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dataservice.dataset.context import Context
from dataservice.dataset.endless import Endless

_AT_ONCE = 1024
"""How many numbers are drawn at once."""


@dataclass(frozen=True)
class Random(Endless):
    """Numbers from 0 on and below 2 ** 32, all alike.

    Attributes:
        seed: Fixes the numbers of each pass; None differs from run to run.
        rerandomize_each_iteration: Whether passes differ from each other.
    """

    seed: int | None
    rerandomize_each_iteration: bool
    _fixed: int = field(repr=False, compare=False, default=0)

    @classmethod
    def of(cls, seed: int | None, rerandomize: bool) -> Random:
        """Local. Check the arguments.

        Raises:
            ValueError: The seed is negative.
        """
        if seed is not None and seed < 0:
            raise ValueError(f"a seed cannot be negative: {seed}")
        # Passes that must agree without a seed need one that belongs to the description.
        return cls(seed, rerandomize, secrets.randbits(63))

    def basis(self, context: Context) -> tuple[int, ...]:
        """Local. See :class:`Endless`."""
        if not self.rerandomize_each_iteration:
            return (self._fixed if self.seed is None else self.seed,)
        if self.seed is None:
            return (*context.seed, crc32(self.summary().encode()), *context.passes)
        return (self.seed, *context.passes)

    def numbers(self, basis: tuple[int, ...]) -> Callable[[int], np.int64]:
        """Local. See :class:`Endless`."""
        return _Drawn(basis).at


class _Drawn:
    """Random numbers by their places; those around the last one are kept."""

    def __init__(self, entropy: tuple[int, ...]) -> None:
        self._entropy = entropy
        self._number = -1
        self._block: NDArray[np.int64] = np.empty(0, np.int64)

    def at(self, place: int) -> np.int64:
        number, within = divmod(place, _AT_ONCE)
        if number != self._number:
            random = np.random.default_rng((*self._entropy, number))
            self._block = random.integers(1 << 32, size=_AT_ONCE, dtype=np.int64)
            self._number = number
        found: np.int64 = self._block[within]
        return found
