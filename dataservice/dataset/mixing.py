"""``Dataset.sample_from_datasets`` and ``choose_from_datasets``."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any
from zlib import crc32

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
)
from dataservice.dataset.combining import RoutedReader, SeveralIterator, SeveralNode, merged_spec
from dataservice.dataset.spec import Spec
from dataservice.dataset.user_functions import check_numbers
from mpidist.errors import InvalidArgumentError

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


@dataclass(frozen=True)
class _Mix(SeveralNode):
    """Attributes: the nodes, and whether the first that ends is the end of all."""

    parents: tuple[Node, ...]
    stop_on_empty: bool

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("give at least one dataset to take elements from")

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        counts = [parent.cardinality() for parent in self._taken()]
        if all(count == INFINITE_CARDINALITY for count in counts):
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if any(counts) else 0

    def _taken(self) -> Sequence[Node]:
        """The nodes that are taken from."""
        return self.parents

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return merged_spec(self._taken())


@dataclass(frozen=True)
class Sample(_Mix):
    """Draws the next element's node at random.

    Where the nodes are indexed, so is their mixture: element i is the same whoever evaluates it.

    Attributes:
        weights: How likely each is, compared with the others.
        seed: Fixes the order of each pass; None differs from run to run.
        rerandomize: Whether each pass has draws of its own.
    """

    weights: tuple[float, ...]
    seed: int | None
    rerandomize: bool = True

    @classmethod
    def of(
        cls,
        parents: tuple[Node, ...],
        weights: Sequence[float] | None,
        seed: int | None,
        stop_on_empty: bool,
        rerandomize: bool = True,
    ) -> Sample:
        """Local. Check the arguments.

        Raises:
            TypeError: Weights are no numbers.
            ValueError: There is no node, or weights are not one a node, negative, or all zero.
        """
        given = (
            [1.0] * len(parents)
            if weights is None
            else check_numbers("sample_from_datasets", "weights", weights)
        )
        fine = len(given) == len(parents) and all(0 <= one < np.inf for one in given)
        # Draws are made below the sum, with all the digits that a number can have.
        if not fine or (parents and not np.finfo(float).tiny <= sum(given) < np.inf):
            raise ValueError(
                f"weights must be {len(parents)} numbers of at least 0, one for each dataset, "
                f"with a positive and finite sum, not {weights!r}"
            )
        if seed is None and not rerandomize:
            seed = secrets.randbits(63)  # shown in the description, of which states are
        return cls(parents, stop_on_empty, tuple(given), seed, rerandomize)

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        counts = [parent.cardinality() for parent in self._taken()]
        if self.stop_on_empty:
            return super().cardinality()
        if INFINITE_CARDINALITY in counts:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in counts else sum(counts)

    def _taken(self) -> Sequence[Node]:
        return [p for p, weight in zip(self.parents, self.weights, strict=True) if weight]

    def indexed_length(self) -> int | None:
        """Return the sum of the lengths; see :class:`Node`."""
        lengths = self.lengths()
        if lengths is None or self.stop_on_empty:
            return None
        pairs = zip(lengths, self.weights, strict=True)
        return min(sum(length for length, weight in pairs if weight), ENDLESS)

    def source_length(self) -> int:
        """Return the number of elements; see :class:`Node`."""
        length = self.indexed_length()
        if length is None:
            raise self.cannot_be_split(
                "elements are drawn by their index, which needs stop_on_empty_dataset=False; "
                "call sample_from_datasets before transformations that drop, flatten or group "
                "elements"
            )
        return length

    @property
    def same_every_epoch(self) -> bool:
        """Local. See :class:`Node`."""
        return not self.rerandomize and super().same_every_epoch

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        lengths = self.lengths()
        assert lengths is not None
        seed = context.own_seed if context.share is None else context.seed
        draws = _EpochDraws(lambda epoch: Draws(lengths, self.weights, self._entropy(seed, epoch)))
        return RoutedReader(self.parents, map(draws.place, places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return SampleIterator(self, context, self._entropy(context.own_seed, context.epoch))

    def _entropy(self, seed: tuple[int, ...], epoch: int) -> tuple[int, ...]:
        """Return what the draws of an epoch depend on."""
        if not self.rerandomize:
            assert self.seed is not None
            return (self.seed,)
        if self.seed is not None:
            return (self.seed, epoch)
        # Of the description as text, so that all processes draw the same.
        return (*seed, crc32(self.summary().encode()), epoch)

    def further(self) -> list[str]:
        """Local. See :class:`SeveralNode`."""
        shown = [f"weights={self.weights}", f"seed={self.seed}"]
        return shown if self.rerandomize else [*shown, "rerandomize=False"]


class _EpochDraws:
    """The draws of the epochs; the last ones are kept.

    Args:
        draws: Gives the draws of an epoch.
    """

    def __init__(self, draws: Callable[[int], Draws]) -> None:
        self._draws = draws
        self._known: dict[int, Draws] = {}

    def place(self, place: Place) -> tuple[int, Place]:
        """Return which node an element is of, and its place there."""
        epoch, index = place
        draws = self._known.get(epoch)
        if draws is None:
            draws = self._draws(epoch)
            self._known = {epoch: draws, **dict(list(self._known.items())[:1])}
        number, within = divmod(index, draws.size)
        nodes, places = draws.block(number)
        return int(nodes[within]), (epoch, int(places[within]))


class _MixIterator(SeveralIterator):
    """A pass that takes elements from one pass or another."""

    def __init__(self, node: _Mix, context: Context) -> None:
        super().__init__(node.begin(context))
        self._stop_on_empty = node.stop_on_empty
        self._ended = [False] * len(node.parents)

    def _take(self, number: int) -> tuple[bool, Any]:
        """The next element of a pass, if it has one; StopIteration if that ends all."""
        if not self._ended[number]:
            try:
                return True, next(self._passes[number])
            except StopIteration:
                self._ended[number] = True
        if self._stop_on_empty:
            self._ended = [True] * len(self._ended)
            raise StopIteration
        return False, None

    def get_state(self) -> tuple[list[bool], Any]:
        """Local. See :class:`ElementIterator`."""
        return list(self._ended), super().get_state()

    def set_state(self, state: tuple[list[bool], Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        ended, below = state
        self._ended = list(ended)
        super().set_state(below)


class SampleIterator(_MixIterator):
    """One pass of draws."""

    def __init__(self, node: Sample, context: Context, entropy: tuple[int, ...]) -> None:
        super().__init__(node, context)
        self._weights = node.weights
        self._random = np.random.default_rng(entropy)
        self._bounds: list[float] | None = None

    def __next__(self) -> Any:
        while True:
            if self._bounds is None:
                self._bounds = bounds(self._weights, self._ended).tolist()
            if not self._bounds[-1]:
                raise StopIteration
            drawn = bisect_right(self._bounds, self._random.random() * self._bounds[-1])
            there, element = self._take(drawn)
            if there:
                return element
            self._bounds = None

    def get_state(self) -> Any:
        """Local. See :class:`ElementIterator`."""
        return self._random.bit_generator.state, super().get_state()

    def set_state(self, state: Any) -> None:
        """Local. See :class:`ElementIterator`."""
        self._random.bit_generator.state, below = state
        self._bounds = None
        super().set_state(below)


@dataclass(frozen=True)
class Choose(_Mix):
    """Takes the next element's node from a sequence of numbers.

    Attributes:
        choice: The node of the numbers.
    """

    choice: Node

    def cardinality(self) -> int:
        """Local. See :class:`Node`; where no node ends, as many as there are choices."""
        count, choices = super().cardinality(), self.choice.cardinality()
        if 0 in (count, choices):
            return 0
        return choices if count == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY

    def sample(self) -> Node:
        """Return a node that computes its first element alone; see :class:`Node`."""
        parents = tuple(parent.sample() for parent in self.parents)
        return dataclasses.replace(self, parents=parents, choice=self.choice.sample())

    def source_length(self) -> int:
        """Raise UnimplementedError; see :class:`Node`."""
        raise self.cannot_be_split("where a choice falls depends on all choices before it")

    def _iterate(self, context: Context) -> ElementIterator:
        return ChooseIterator(self, context)

    def further(self) -> list[str]:
        """Local. See :class:`SeveralNode`."""
        return [f"choice={self.choice.summary()}"]


class ChooseIterator(_MixIterator):
    """One pass of choices."""

    def __init__(self, node: Choose, context: Context) -> None:
        super().__init__(node, context)
        self._choice = node.choice.iterate(context)

    def __next__(self) -> Any:
        while not all(self._ended):
            choice = next(self._choice)
            try:
                number = index(choice)
            except TypeError:
                raise InvalidArgumentError(
                    f"choose_from_datasets: choice {choice!r} is not a whole number"
                ) from None
            if not 0 <= number < len(self._passes):
                raise InvalidArgumentError(
                    f"choose_from_datasets: choice {number} is not in [0, {len(self._passes)})"
                )
            there, element = self._take(number)
            if there:
                return element
        raise StopIteration

    def get_state(self) -> Any:
        """Local. See :class:`ElementIterator`."""
        return self._choice.get_state(), super().get_state()

    def set_state(self, state: Any) -> None:
        """Local. See :class:`ElementIterator`."""
        choice, below = state
        self._choice.set_state(choice)
        super().set_state(below)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        super().close()
        self._choice.close()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return super().goes_on(error) and self._choice.goes_on(error)
