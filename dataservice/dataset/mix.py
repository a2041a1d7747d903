"""``Dataset.sample_from_datasets`` and ``choose_from_datasets``: one of several, each time."""

from __future__ import annotations

import dataclasses
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any
from zlib import crc32

import numpy as np

from dataservice.dataset.checks import numbers
from dataservice.dataset.context import Context
from dataservice.dataset.draws import Draws, bounds
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
)
from dataservice.dataset.several import SeveralIterator, SeveralNode, merged_spec
from dataservice.dataset.spec import Spec
from dataservice.dataset.split_sample import SplitSampleIterator
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

    Where the nodes are one to one, so is their mixture: element i is the same whoever makes it.

    Attributes:
        weights: How likely each is, compared with the others.
        seed: Fixes the order of each pass; None differs from run to run.
        rerandomize: Whether each pass has draws of its own.
    """

    weights: tuple[float, ...]
    seed: int | None
    rerandomize: bool = True
    _fixed: int = field(repr=False, compare=False, default=0)

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
        # Passes that must agree without a seed need one that belongs to the description.
        fixed = secrets.randbits(63)
        return cls(parents, stop_on_empty, tuple(given), seed, rerandomize, fixed)

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

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        # Of the description as text, so that all processes draw the same.
        own = (*context.seed, crc32(self.summary().encode()))
        if self.rerandomize:
            entropy = (*(own if self.seed is None else (self.seed,)), *context.passes)
        else:
            entropy = (self._fixed if self.seed is None else self.seed,)
        if context.feed is None:
            # Copies of a worker each are not the same.
            own = context.part if self.seed is None else ()
            return SampleIterator(self, context, (*entropy, *own))
        lengths = [len(parent.source_indices()) for parent in self.parents]
        draws = Draws(lengths, self.weights, entropy)
        return SplitSampleIterator(self.parents, draws, context, context.feed)

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return not self.stop_on_empty and all(parent.one_to_one for parent in self.parents)

    @property
    def steady(self) -> bool:
        """Local. See :class:`Node`."""
        return False

    @property
    def random_access(self) -> bool:
        """Local. See :class:`Node`; to draw from any place on takes long."""
        return False

    def source_indices(self) -> range:
        """Local. See :class:`Node`; the numbers of its elements."""
        lengths = [len(parent.source_indices()) for parent in self.parents]
        if not self.one_to_one:
            raise self.cannot_be_split(
                "elements are drawn by their index, which needs stop_on_empty_dataset=False; "
                "call sample_from_datasets before transformations that drop, reorder, flatten "
                "or repeat elements"
            )
        pairs = zip(lengths, self.weights, strict=True)
        return range(sum(length for length, weight in pairs if weight))

    def further(self) -> list[str]:
        """Local. See :class:`SeveralNode`."""
        shown = [f"weights={self.weights}", f"seed={self.seed}"]
        return shown if self.rerandomize else [*shown, "rerandomize=False"]


class _MixIterator(SeveralIterator):
    """A pass that takes elements from one pass or another."""

    def __init__(self, node: _Mix, context: Context) -> None:
        super().__init__(lambda: node.begin(context))
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

    def source_indices(self) -> range:
        """Local. See :class:`Node`."""
        raise self.cannot_be_split("where a choice falls depends on all choices before it")

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
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
