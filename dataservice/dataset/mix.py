"""``Dataset.sample_from_datasets`` and ``choose_from_datasets``: one of several, each time."""

from __future__ import annotations

import dataclasses
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any
from zlib import crc32

import numpy as np

from dataservice.dataset.checks import numbers
from dataservice.dataset.context import Context
from dataservice.dataset.draws import Draws, bounds
from dataservice.dataset.node import (
    ENDLESS,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    Place,
)
from dataservice.dataset.several import RoutedReader, SeveralIterator, SeveralNode, merged_spec
from dataservice.dataset.spec import Spec
from mpidist.errors import InvalidArgumentError


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
            else numbers("sample_from_datasets", "weights", weights)
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
