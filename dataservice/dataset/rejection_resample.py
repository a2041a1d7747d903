"""``Dataset.rejection_resample``: elements left out, so that classes are as frequent as wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from dataservice.dataset.answers import number
from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.spec import ArraySpec, Spec
from mpidist.errors import InvalidArgumentError

_SEEN_BEFORE = 10
"""As if so many elements of each class had come before the first, as in TensorFlow."""


@dataclass(frozen=True)
class RejectionResample(UnaryNode):
    """Keeps elements at random, and gives them with their classes.

    Attributes:
        parent: The node below.
        class_of: Says which class an element is of.
        target: How frequent classes shall be, compared with each other.
        initial: How frequent they are below; None: as they have been so far.
        seed: Fixes what is kept in each pass; None differs from run to run.
    """

    parent: Node
    class_of: Callable[..., Any]
    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    seed: int | None

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"a seed cannot be negative: {self.seed}")
        _check_shares("target_dist", self.target)
        if self.initial is not None:
            _check_shares("initial_dist", self.initial)
            _check_together(self.target, self.initial)

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
        return ArraySpec((), np.int64), self.parent.element_spec()

    def _iterate(self, context: Context) -> ElementIterator:
        return RejectionResampleIterator(self, context)

    def entropy(self, context: Context) -> tuple[int, ...]:
        """Local. What a pass keeps depends on it."""
        if self.seed is not None:
            return (self.seed, context.epoch)
        # Of the description as text alone, so that a state means the same to another process.
        return (*context.own_seed, crc32(self.summary().encode()), context.epoch)

    def class_number(self, element: Any) -> int:
        """Local. Which class an element is of.

        Raises:
            InvalidArgumentError: It is none of those that the target has.
        """
        found = number(self.class_of, element, "rejection_resample")
        if not 0 <= found < len(self.target):
            raise InvalidArgumentError(
                f"rejection_resample: class {found} is not in [0, {len(self.target)})"
            )
        return found


class RejectionResampleIterator(UnaryIterator):
    """One pass; draws a random number for each element, and counts those of each class."""

    def __init__(self, node: RejectionResample, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        self._random = np.random.default_rng(node.entropy(context))
        self._seen = [_SEEN_BEFORE] * len(node.target)

    def __next__(self) -> tuple[np.int64, Any]:
        while True:
            element = next(self._parent)
            found = self._node.class_number(element)
            self._seen[found] += 1
            if self._random.random() < self._chance(found):
                return np.int64(found), element

    def get_state(self) -> tuple[Any, list[int], Any]:
        """Local. See :class:`ElementIterator`."""
        return self._random.bit_generator.state, list(self._seen), super().get_state()

    def set_state(self, state: tuple[Any, list[int], Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._random.bit_generator.state, seen, below = state
        self._seen = list(seen)
        super().set_state(below)

    def _chance(self, found: int) -> float:
        """How likely an element of a class stays; 1 for the class that is wanted most."""
        there = self._seen if self._node.initial is None else self._node.initial
        wanted = [
            share / count if share > 0 else 0.0
            for share, count in zip(self._node.target, there, strict=True)
        ]
        return wanted[found] / max(wanted)


def _check_shares(name: str, shares: tuple[float, ...]) -> None:
    if not (np.isfinite(shares).all() and min(shares, default=0) >= 0 and sum(shares) > 0):
        raise ValueError(
            f"rejection_resample needs finite numbers of at least 0, not all 0, as {name}, not "
            f"{list(shares)}"
        )


def _check_together(target: tuple[float, ...], initial: tuple[float, ...]) -> None:
    if len(target) != len(initial):
        raise ValueError(
            f"rejection_resample: target_dist has {len(target)} classes, and initial_dist "
            f"{len(initial)}"
        )
    for each, (wanted, there) in enumerate(zip(target, initial, strict=True)):
        if wanted and not there:
            raise ValueError(
                f"rejection_resample: target_dist has class {each}, whose probability in "
                "initial_dist is 0"
            )
