"""Which of several sequences each element of a mixture is of, from any place on. Pure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.intp]

Drawn = tuple[Any, tuple[int, ...], tuple[bool, ...]]
"""What is known after some draws: the state of the generator of random numbers, how many elements
of each sequence there have been, and which of them are known to have no more."""

BLOCK = 1 << 14
"""How many elements are drawn at once."""

_KEPT = 8
_FEW = 64


def bounds(weights: Sequence[float], ended: Sequence[bool] | NDArray[np.bool_]) -> NDArray[Any]:
    """Local. The sequence of a random number below the last of them is the first with more.

    Args:
        weights: How likely each sequence is.
        ended: Which of them have no more; the last bound is 0 if none has.
    """
    return np.cumsum(np.where(ended, 0.0, weights))


class Draws:
    """The draws of a pass over a mixture of sequences that are as long as is said.

    One random number an element, and one more where a sequence is found at its end: the same as
    drawn one by one while the sequences are read. Threads may share it.

    Args:
        lengths: Of the sequences.
        weights: How likely each is.
        entropy: What the draws depend on.
        block: How many are drawn at once.

    Attributes:
        size: The same.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Sequence[float],
        entropy: Sequence[int],
        block: int = BLOCK,
    ) -> None:
        self.size = block
        self._lengths = np.array(lengths)
        self._weights = weights
        self._random = np.random.default_rng(entropy)
        none = len(lengths)
        begin = (self._random.bit_generator.state, (0,) * none, (False,) * none)
        self._known: dict[int, Drawn] = {0: begin}  # by the number of the block that follows
        self._blocks: dict[int, tuple[Numbers, Numbers]] = {}
        self._lock = threading.Lock()

    def block(self, number: int) -> tuple[Numbers, Numbers]:
        """Local. The elements of a block: the sequence of each, and its place there."""
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                drawn = self._before(number)
                sequences, after = self._draw(drawn)
                self._known[number + 1] = after
                block = sequences, _places(sequences, np.array(drawn[1]))
            self._blocks.pop(number, None)
            self._blocks[number] = block
            while len(self._blocks) > _KEPT:  # those that were used last stay
                del self._blocks[next(iter(self._blocks))]
            return block

    def _before(self, number: int) -> Drawn:
        nearest = max(known for known in self._known if known <= number)
        drawn = self._known[nearest]
        for each in range(nearest, number):
            _, drawn = self._draw(drawn)
            self._known[each + 1] = drawn
        return drawn

    def _draw(self, drawn: Drawn) -> tuple[Numbers, Drawn]:
        """A block by what is known before it: the sequences of its elements, and what is then."""
        state, *known = drawn
        random, (counts, ended) = self._random, map(np.array, known)
        random.bit_generator.state = state
        parts: list[Numbers] = [np.empty(0, np.intp)]
        left = most = self.size
        while left:
            limits = bounds(self._weights, ended)
            if not limits[-1]:
                break
            before = random.bit_generator.state
            numbers = random.random(min(left, most))
            found = np.searchsorted(limits, numbers * limits[-1], "right")
            fine = _until_end(found, counts, self._lengths)
            parts.append(found[:fine])
            counts += np.bincount(found[:fine], minlength=len(counts))
            left -= fine
            most = 2 * most
            if fine < len(found):  # this draw finds a sequence at its end
                ended[found[fine]] = True
                random.bit_generator.state = before
                random.random(fine + 1)
                most = _FEW  # perhaps others end soon, too
        after = (random.bit_generator.state, tuple(counts.tolist()), tuple(ended.tolist()))
        return np.concatenate(parts), after


def _until_end(found: Numbers, counts: Numbers, lengths: Numbers) -> int:
    """How many draws there are before the first of a sequence that has no more."""
    if np.all(counts + np.bincount(found, minlength=len(counts)) <= lengths):
        return len(found)
    return int(np.argmax(_places(found, counts) >= lengths[found]))


def _places(sequences: Numbers, counts: Numbers) -> Numbers:
    """The place of each element in its sequence, of which there have been some before."""
    order = np.argsort(sequences, kind="stable")
    own = np.bincount(sequences, minlength=len(counts))
    places = np.empty(len(sequences), np.intp)
    places[order] = np.arange(len(sequences)) + np.repeat(counts - (np.cumsum(own) - own), own)
    return places
