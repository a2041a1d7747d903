"""``Dataset.sample_from_datasets`` and ``choose_from_datasets``."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.dataset.arguments import check_numbers
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
from mpidist.errors import InvalidArgumentError

Numbers = NDArray[np.intp]

Drawn = tuple[Any, tuple[int, ...], tuple[bool, ...]]
"""The state after some draws: the state of the random generator, the number of elements taken from
each sequence, and whether each sequence is known to have ended."""

BLOCK = 1 << 14
"""The number of elements drawn at once."""

_KEPT = 8
_FEW = 64


def bounds(weights: Sequence[float], ended: Sequence[bool] | NDArray[np.bool_]) -> NDArray[Any]:
    """Return cumulative weights of the sequences that have not ended.

    A draw u < bounds[-1] selects the first sequence with a bound above u.

    Args:
        weights: The weight of each sequence.
        ended: Whether each sequence has ended. If all have, the last bound is 0.
    """
    return np.cumsum(np.where(ended, 0.0, weights))


class Draws:
    """The draws of a pass over a mixture of sequences of known lengths, from any position on.

    Each element takes one random number, and one more each time when a sequence is found at its
    end. So the draws equal those made one by one while the sequences are read. Threads may share
    the object.

    Args:
        lengths: The lengths of the sequences.
        weights: The weight of each sequence.
        entropy: The seed of the draws.
        block: The number of elements drawn at once.

    Attributes:
        size: The number of elements in a block.
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
        """Return the sequence of each element of a block, and its index in that sequence."""
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                drawn = self._before(number)
                sequences, after = self._draw(drawn)
                self._known[number + 1] = after
                block = sequences, _places(sequences, np.array(drawn[1]))
            self._blocks.pop(number, None)
            self._blocks[number] = block
            while len(self._blocks) > _KEPT:  # the last used blocks stay
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
        """Return the sequences of the elements of a block, and the state after it."""
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
    """Return the number of draws before the first one of a sequence that has ended."""
    if np.all(counts + np.bincount(found, minlength=len(counts)) <= lengths):
        return len(found)
    return int(np.argmax(_places(found, counts) >= lengths[found]))


def _places(sequences: Numbers, counts: Numbers) -> Numbers:
    """Return the index of each element in its sequence, after the elements taken before."""
    order = np.argsort(sequences, kind="stable")
    own = np.bincount(sequences, minlength=len(counts))
    places = np.empty(len(sequences), np.intp)
    places[order] = np.arange(len(sequences)) + np.repeat(counts - (np.cumsum(own) - own), own)
    return places


@dataclass(frozen=True)
class _Mix(SeveralNode):
    """Attributes: the nodes, and whether the first end of a node ends the mixture."""

    parents: tuple[Node, ...]
    stop_on_empty: bool

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("give at least one dataset to take elements from")

    def cardinality(self) -> int:
        counts = [parent.cardinality() for parent in self._taken()]
        if all(count == INFINITE_CARDINALITY for count in counts):
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if any(counts) else 0

    def _taken(self) -> Sequence[Node]:
        """Return the nodes that the mixture may take elements from."""
        return self.parents

    def element_spec(self) -> Spec:
        return merged_spec(self._taken())


@dataclass(frozen=True)
class Sample(_Mix):
    """Draws the next element's node at random.

    A mixture of indexed nodes is indexed, too: element i does not depend on the process.

    Attributes:
        weights: How likely each is, compared with the others.
        seed: Fixes the order of each pass; None differs from run to run.
        rerandomize: Whether each pass has draws of its own.
    """

    weights: tuple[float, ...]
    seed: int | None
    rerandomize: bool = True

    @classmethod
    def method_name(cls) -> str:
        return "sample_from_datasets"

    @classmethod
    def of(
        cls,
        parents: tuple[Node, ...],
        weights: Sequence[float] | None,
        seed: int | None,
        stop_on_empty: bool,
        rerandomize: bool = True,
    ) -> Sample:
        """Check the arguments, and describe the mixture.

        Raises:
            TypeError: A weight is not a number.
            ValueError: There are no nodes, or the weights are not one per node, negative or all 0.
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
        counts = [parent.cardinality() for parent in self._taken()]
        if self.stop_on_empty:
            return super().cardinality()
        if INFINITE_CARDINALITY in counts:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in counts else sum(counts)

    def _taken(self) -> Sequence[Node]:
        return [p for p, weight in zip(self.parents, self.weights, strict=True) if weight]

    def indexed_length(self) -> int | None:
        lengths = self.lengths()
        if lengths is None or self.stop_on_empty:
            return None
        pairs = zip(lengths, self.weights, strict=True)
        return min(sum(length for length, weight in pairs if weight), ENDLESS)

    def source_length(self) -> int:
        return self.indexed_only(
            "elements are drawn by their index, which needs stop_on_empty_dataset=False; "
            "call sample_from_datasets before transformations that drop, flatten or group "
            "elements, and before a small shuffle"
        )

    @property
    def same_every_epoch(self) -> bool:
        return not self.rerandomize and super().same_every_epoch

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        lengths = self.lengths()
        assert lengths is not None
        seed = context.own_seed if context.share is None else context.seed
        # Places of two epochs may alternate where one ends and the next begins.
        draws_of = lru_cache(maxsize=2)(
            lambda epoch: Draws(lengths, self.weights, self._entropy(seed, epoch))
        )

        def route(place: Place) -> tuple[int, Place]:
            epoch, index = place
            draws = draws_of(epoch)
            number, within = divmod(index, draws.size)
            nodes, places = draws.block(number)
            return int(nodes[within]), (epoch, int(places[within]))

        return RoutedReader(self.parents, map(route, places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return SampleIterator(self, context, self._entropy(context.own_seed, context.epoch))

    def _entropy(self, seed: tuple[int, ...], epoch: int) -> tuple[int, ...]:
        """Return the seed of the draws of an epoch."""
        if not self.rerandomize:
            assert self.seed is not None
            return (self.seed,)
        return self.entropy(self.seed, seed, epoch)

    def further(self) -> list[str]:
        shown = [f"weights={self.weights}", f"seed={self.seed}"]
        return shown if self.rerandomize else [*shown, "rerandomize=False"]


class _MixIterator(SeveralIterator):
    """A pass that takes elements from one pass or another."""

    def __init__(self, node: _Mix, context: Context) -> None:
        super().__init__(node.begin(context))
        self._stop_on_empty = node.stop_on_empty
        self._ended = [False] * len(node.parents)

    def _take(self, number: int) -> tuple[bool, Any]:
        """Return whether a pass has an element, and that element."""
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
        return list(self._ended), super().get_state()

    def set_state(self, state: tuple[list[bool], Any]) -> None:
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
        return self._random.bit_generator.state, super().get_state()

    def set_state(self, state: Any) -> None:
        self._random.bit_generator.state, below = state
        self._bounds = None
        super().set_state(below)


@dataclass(frozen=True)
class Choose(_Mix):
    """Takes each element from a node. A sequence yields the numbers of the nodes.

    Attributes:
        choice: The node of the numbers.
    """

    choice: Node

    @classmethod
    def method_name(cls) -> str:
        return "choose_from_datasets"

    def cardinality(self) -> int:
        # If no node ends, there are as many elements as choices.
        count, choices = super().cardinality(), self.choice.cardinality()
        if 0 in (count, choices):
            return 0
        return choices if count == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY

    def source_length(self) -> int:
        raise self.cannot_be_split("where a choice falls depends on all choices before it")

    def _iterate(self, context: Context) -> ElementIterator:
        return ChooseIterator(self, context)

    def further(self) -> list[str]:
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
        return self._choice.get_state(), super().get_state()

    def set_state(self, state: Any) -> None:
        choice, below = state
        self._choice.set_state(choice)
        super().set_state(below)

    def close(self) -> None:
        super().close()
        self._choice.close()

    def goes_on(self, error: Exception) -> bool:
        return super().goes_on(error) and self._choice.goes_on(error)
