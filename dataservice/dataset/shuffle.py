"""``Dataset.shuffle``: random order within a buffer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any
from zlib import crc32

import numpy as np

from dataservice.dataset.node import Context, ElementIterator, Node, UnaryIterator, UnaryNode


@dataclass(frozen=True)
class Shuffle(UnaryNode):
    """Draws each element at random from the next ``buffer_size`` ones.

    Attributes:
        parent: The node below.
        buffer_size: Elements to draw from.
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
            ValueError: The buffer size is below 1, or the seed is negative.
        """
        if buffer_size < 1:
            raise ValueError(f"shuffle needs a buffer_size of at least 1, not {buffer_size}")
        if seed is not None and seed < 0:
            raise ValueError(f"a seed cannot be negative: {seed}")
        # Passes that must agree without a seed need one that belongs to the description.
        return cls(parent, buffer_size, seed, reshuffle, secrets.randbits(63))

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        entropy: tuple[int, ...]
        if not self.reshuffle_each_iteration:
            entropy = (self._fixed if self.seed is None else self.seed,)
        elif self.seed is None:
            # Of the description as text alone, so that a state means the same to another process.
            entropy = (*context.seed, crc32(self.summary().encode()), *context.passes)
        else:
            entropy = (self.seed, *context.passes)
        return ShuffleIterator(self.parent.iterate(context), self.buffer_size, entropy)


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
