"""A random order of numbers, any of which can be had without the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

LISTED = 1 << 21
_ROUNDS = 8
_AT_ONCE = 1024


class Permutation:
    """A random order of 0, 1, ..., ``length - 1``.

    Up to two million numbers are shuffled, in 8 MB that the parts in a process share. More are
    enciphered, with no memory: a Feistel network (Luby and Rackoff, SIAM J.
    Comput. 17, 1988) permutes the next larger power of 4, and is applied again to what comes out
    too large (cycle walking; Black and Rogaway, CT-RSA 2002).

    Args:
        length: How many numbers.
        entropy: What the order depends on.
        listed: How many numbers may be shuffled in memory.
    """

    def __init__(self, length: int, entropy: Sequence[int], listed: int = LISTED) -> None:
        self._length = length
        self._listed = _shuffled(length, tuple(entropy)) if length <= listed else None
        self._half = ((length - 1).bit_length() + 1) // 2
        self._block: tuple[int, Numbers] | None = None  # the last one that was enciphered
        self._keys = np.random.default_rng(entropy).integers(0, 1 << 64, _ROUNDS, np.uint64)

    def __getitem__(self, place: int) -> int:
        """Return the number at a place of the order."""
        if self._listed is not None:
            return int(self._listed[place])
        number, within = divmod(place, _AT_ONCE)
        known = self._block
        if known is None or known[0] != number:
            known = self._block = number, self._numbers(number * _AT_ONCE)
        return int(known[1][within])

    def _numbers(self, start: int) -> Numbers:
        """Return the numbers at the places from one on, ``_AT_ONCE`` of them."""
        stop = min(start + _AT_ONCE, self._length)
        found = self._encipher(np.arange(start, stop).astype(np.uint64))
        while len(over := np.flatnonzero(found >= self._length)):
            found[over] = self._encipher(found[over])
        return found.astype(np.int64)

    def _encipher(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = numbers >> half, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << half | right


@lru_cache(maxsize=4)
def _shuffled(length: int, entropy: tuple[int, ...]) -> NDArray[np.int32]:
    return np.random.default_rng(entropy).permutation(np.arange(length, dtype=np.int32))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit depends on all: the last steps of SplitMix64 (Steele et al., OOPSLA 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
