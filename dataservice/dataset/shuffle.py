"""``Dataset.shuffle``: random order within a buffer."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any
from zlib import crc32

import numpy as np

from dataservice.dataset.context import Context, Feed, Splits
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.permutation import Permutation
from dataservice.dataset.runs import AT_ONCE, SplitUnaryIterator


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
        """Local. Check the arguments.

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

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`; where it shuffles all, element i is the i-th of an order.

        But an order for all passes without a seed is this process's own, so that states of parts
        must have it.
        """
        has_order = self.seed is not None or self.reshuffle_each_iteration
        below = self.parent
        return (
            has_order
            and below.one_to_one
            and below.random_access
            and 0 <= below.cardinality() <= self._held
        )

    @property
    def _held(self) -> int:
        """The most elements that are held to draw from."""
        return sys.maxsize if self.buffer_size == UNKNOWN_CARDINALITY else self.buffer_size

    def source_indices(self) -> range:
        """Local. See :class:`Node`; where it shuffles all, places in its order."""
        below = self.parent.source_indices()
        return range(len(below)) if self.one_to_one else below

    @property
    def steady(self) -> bool:
        """Local. See :class:`Node`."""
        return not self.reshuffle_each_iteration and self.parent.steady

    def sample(self) -> Node:
        """Return the sample of the node below, whose elements are alike; see :class:`Node`."""
        return self.parent.sample()

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        if context.feed is not None and self.one_to_one:
            entropy = self._entropy(replace(context, part=()))
            return SplitShuffleIterator(self.parent, entropy, context, context.feed)
        return ShuffleIterator(self.parent.iterate(context), self._held, self._entropy(context))

    def _entropy(self, context: Context) -> tuple[int, ...]:
        """What the order of a pass depends on."""
        if not self.reshuffle_each_iteration:
            return (self._fixed if self.seed is None else self.seed,)
        if self.seed is None:
            # Of the description as text alone, so that a state means the same to another process.
            own = (*context.seed, *context.part)
            return (*own, crc32(self.summary().encode()), *context.passes)
        return (self.seed, *context.passes)


class ShuffleIterator(UnaryIterator):
    """One pass.

    Args:
        parent: The pass below.
        buffer_size: Elements to draw from.
        entropy: What the order depends on.
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
        """Local. See :class:`ElementIterator`; the elements that are held are a part of it."""
        random = self._random.bit_generator.state
        return random, list(self._buffer), self._drained, super().get_state()

    def set_state(self, state: tuple[Any, list[Any], bool, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._random.bit_generator.state, buffer, self._drained, below = state
        self._buffer = list(buffer)
        super().set_state(below)


class SplitShuffleIterator(SplitUnaryIterator):
    """A pass over some splits of a sequence that is shuffled as a whole; nothing is held.

    Args:
        parent: The node below, one to one.
        entropy: What the order depends on.
        context: Of the pass.
        feed: Of the context.
    """

    def __init__(
        self, parent: Node, entropy: tuple[int, ...], context: Context, feed: Feed
    ) -> None:
        super().__init__(parent, context, feed)
        self._order = Permutation(len(self._below), entropy)

    def _element(self, index: int) -> Any:
        return self._next_below()

    def _runs(self, number: int, position: int) -> Iterator[range]:
        return _drawn(self._splits, number, position, self._order, self._below)


def _drawn(
    splits: Splits, number: int, position: int, order: Permutation, below: range
) -> Iterator[range]:
    """The indices of the elements of an order, from a place among the splits on."""
    while split := splits.split(number):
        for start in range(position, len(split), AT_ONCE):
            for place in order.at(split[start : start + AT_ONCE]).tolist():
                yield below[place : place + 1]
        number, position = number + 1, 0
