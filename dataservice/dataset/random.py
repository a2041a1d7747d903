"""``Dataset.random``: random whole numbers without an end."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dataservice.dataset.context import Context
from dataservice.dataset.endless import Endless, Numbers
from dataservice.dataset.node import ENDLESS, ElementIterator, IndexReader

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

    def indexed_length(self) -> int | None:
        """Return ENDLESS, but None if all passes have the same numbers without a seed.

        Those numbers are this process's own: another one could not go on without their seed.
        """
        return ENDLESS if self.seed is not None or self.rerandomize_each_iteration else None

    def source_length(self) -> int:
        """Return 1 if the node is sequential, because one worker makes all elements."""
        return 1 if self.indexed_length() is None else ENDLESS

    @property
    def same_every_epoch(self) -> bool:
        """Local. See :class:`Node`."""
        return not self.rerandomize_each_iteration

    def numbers(self, context: Context, epoch: int) -> Numbers:
        """Return what gives the elements of an epoch."""
        if not self.rerandomize_each_iteration:
            assert self.seed is not None
            return _Drawn((self.seed,)).at
        if self.seed is None:
            return _Drawn((*context.seed, crc32(self.summary().encode()), epoch)).at
        return _Drawn((self.seed, epoch)).at

    def _iterate(self, context: Context) -> ElementIterator:
        return _RandomIterator(self._fixed, IndexReader(1, context.share))


class _RandomIterator(ElementIterator):
    """One pass, in the process that gets its only index; the seed is in the state."""

    def __init__(self, seed: int, indices: IndexReader) -> None:
        self._drawn = _Drawn((seed,))
        self._seed = seed
        self._indices = indices
        self._place: int | None = None  # of the next number; None before the index is had

    def __next__(self) -> np.int64:
        if self._place is None:
            next(self._indices)
            self._place = 0
        self._place += 1
        return self._drawn.at(self._place - 1)

    def get_state(self) -> tuple[int, int, int | None]:
        """Local. See :class:`ElementIterator`."""
        return self._indices.get_state(), self._seed, self._place

    def set_state(self, state: tuple[int, int, int | None]) -> None:
        """Local. See :class:`ElementIterator`."""
        position, self._seed, self._place = state
        self._drawn = _Drawn((self._seed,))
        self._indices.set_state(position)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""


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
