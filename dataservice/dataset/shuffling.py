"""``Dataset.shuffle``: permutations of all elements, or a buffer."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.dataset.base import (
    ENDLESS,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    Node,
    Place,
    UnaryIterator,
    UnaryNode,
)

Numbers = NDArray[np.int64]

LISTED = 1 << 21
_ROUNDS = 8
_AT_ONCE = 1024


class Permutation:
    """A random order of 0, 1, ..., ``length - 1``.

    Up to two million numbers are shuffled, in 8 MB that the parts in a process share. More are
    enciphered, with no memory: a Feistel network (Luby and Rackoff, SIAM J.
    Comput. 17, 1988) permutes the next larger power of 4, and is applied again to numbers that come
    out too large (cycle walking; Black and Rogaway, CT-RSA 2002).

    Args:
        length: The number of elements.
        entropy: The seed of the order.
        listed: The largest length that is shuffled in memory.
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
    """Mix all bits of each number: the last steps of SplitMix64 (Steele et al., OOPSLA 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@dataclass(frozen=True)
class Shuffle(UnaryNode):
    """Draws each element at random from the next ``buffer_size`` ones.

    Attributes:
        parent: The node below.
        buffer_size: Elements to draw from; UNKNOWN_CARDINALITY: all.
        seed: Fixes the order of each pass; None differs from run to run.
        reshuffle_each_iteration: Whether passes differ from each other.
    """

    parent: Node
    buffer_size: int
    seed: int | None
    reshuffle_each_iteration: bool
    _fixed: int = dataclass_field(repr=False, compare=False, default=0)

    @classmethod
    def of(cls, parent: Node, buffer_size: int, seed: int | None, reshuffle: bool) -> Shuffle:
        """Check the arguments, and describe the order.

        Raises:
            ValueError: The buffer size is below 1, or the seed is negative; or there is no end of
                elements, all of which are to be held.
        """
        if buffer_size == UNKNOWN_CARDINALITY:
            if parent.cardinality() == INFINITE_CARDINALITY:
                raise ValueError("shuffle without a buffer_size needs a finite dataset")
        elif buffer_size < 1:
            raise ValueError(f"shuffle needs a buffer_size of at least 1, not {buffer_size}")
        if seed is not None and seed < 0:
            raise ValueError(f"a seed cannot be negative: {seed}")
        # Passes that must agree without a seed need one that belongs to the description.
        return cls(parent, buffer_size, seed, reshuffle, secrets.randbits(63))

    def indexed_length(self) -> int | None:
        # Without a seed and without reshuffling, the order is known only to this process. Another
        # process cannot continue, so the buffer must be in the state.
        has_order = self.seed is not None or self.reshuffle_each_iteration
        below = self.parent.indexed_length()
        fits = below is not None and below <= min(self._held, ENDLESS - 1)
        return below if has_order and fits else None

    @property
    def _held(self) -> int:
        """The most elements that are held to draw from."""
        return sys.maxsize if self.buffer_size == UNKNOWN_CARDINALITY else self.buffer_size

    @property
    def same_every_epoch(self) -> bool:
        return not self.reshuffle_each_iteration and self.parent.same_every_epoch

    def sample(self) -> Node:
        # The elements of the node below are alike, and no buffer is filled.
        return self.parent.sample()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        length = self.indexed_length()
        assert length is not None
        # Where several processes evaluate parts of the sequence, all have the same order.
        seed = context.own_seed if context.share is None else context.seed
        # Places of two epochs may alternate where one ends and the next begins.
        order_of = lru_cache(maxsize=2)(
            lambda epoch: Permutation(length, self._entropy(seed, epoch))
        )

        def place_below(place: Place) -> Place:
            epoch, index = place
            return epoch, order_of(epoch)[index]

        return self.parent.read(map(place_below, places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        entropy = self._entropy(context.own_seed, context.epoch)
        return ShuffleIterator(self.parent.iterate(context), self._held, entropy)

    def _entropy(self, seed: tuple[int, ...], epoch: int) -> tuple[int, ...]:
        """Return the seed of the order of an epoch."""
        if not self.reshuffle_each_iteration:
            return (self._fixed if self.seed is None else self.seed,)
        return self.entropy(self.seed, seed, epoch)


class ShuffleIterator(UnaryIterator):
    """One pass.

    Args:
        parent: The pass below.
        buffer_size: Elements to draw from.
        entropy: The seed of the order.
    """

    def __init__(self, parent: ElementIterator, buffer_size: int, entropy: tuple[int, ...]) -> None:
        super().__init__(parent)
        self._size = buffer_size
        self._random = np.random.default_rng(entropy)
        self._buffer: list[Any] = []
        self._drained = False

    def __next__(self) -> Any:
        buffer = self._buffer
        while len(buffer) < self._size and not self._drained:
            try:
                buffer.append(next(self._parent))
            except StopIteration:
                self._drained = True
        if not buffer:
            raise StopIteration
        # random() is ten times faster than integers(); 53 bits leave no bias that shows.
        drawn = int(self._random.random() * len(buffer))
        buffer[drawn], buffer[-1] = buffer[-1], buffer[drawn]
        return buffer.pop()

    def get_state(self) -> tuple[Any, list[Any], bool, Any]:
        random = self._random.bit_generator.state
        return random, list(self._buffer), self._drained, super().get_state()

    def set_state(self, state: tuple[Any, list[Any], bool, Any]) -> None:
        self._random.bit_generator.state, buffer, self._drained, below = state
        self._buffer = list(buffer)
        super().set_state(below)
