"""``Dataset.interleave`` and ``flat_map``: each element becomes a dataset of elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.functions import Samples, call
from dataservice.dataset.node import (
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.prefetch import Prefetch
from dataservice.dataset.spec import Spec, spec_of


@dataclass(frozen=True)
class Interleave(UnaryNode):
    """Takes elements in turn from as many datasets at once as its cycle is long.

    Attributes:
        parent: The node below.
        function: Makes a node of each element.
        cycle_length: How many of these nodes are open at once.
        block_length: How many elements a node gives in its turn.
        ahead: How many places of the cycle, from the first on, read their next turn ahead.
    """

    parent: Node
    function: Callable[..., Node]
    cycle_length: int
    block_length: int
    ahead: int = 0

    def __post_init__(self) -> None:
        for name in ("cycle_length", "block_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"interleave needs a {name} of at least 1")

    def cardinality(self) -> int:
        return 0 if self.parent.cardinality() == 0 else UNKNOWN_CARDINALITY

    def element_spec(self) -> Spec:
        return spec_of(self.first())

    @property
    def has_static_spec(self) -> bool:
        return False  # a function makes the datasets

    def sample(self) -> Node:
        # A dataset that is read ahead computes more than the first element.
        return dataclasses.replace(
            self, parent=self.parent.sample(), function=Samples(self.function), ahead=0
        )

    def _iterate(self, context: Context) -> ElementIterator:
        return InterleaveIterator(self, context)


@dataclass
class _Open:
    """Attributes: an element of the node below, its number, and the pass over its dataset."""

    element: Any
    number: int
    elements: ElementIterator


class InterleaveIterator(UnaryIterator):
    """One pass; holds an element of the pass below for each dataset that is open.

    The order is that of TensorFlow's ``interleave``: a dataset that has ended leaves its place,
    which is filled when its turn comes again.
    """

    def __init__(self, node: Interleave, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        # What is dealt out between workers is the pass below.
        self._context = context.alone()
        self._cycle: list[_Open | None] = [None] * node.cycle_length
        self._place = 0  # in the cycle
        self._given = 0  # by the dataset at this place, in its turn
        self._number = 0  # of elements of the pass below
        self._ended = False

    def __next__(self) -> Any:
        while not self._ended or any(self._cycle):
            current = self._cycle[self._place]
            if current is None:
                self._open()
                continue
            try:
                element = next(current.elements)
            except StopIteration:
                current.elements.close()
                self._cycle[self._place] = None
                self._advance()
                continue
            self._given += 1
            if self._given == self._node.block_length:
                self._advance()
            return element
        raise StopIteration

    def get_state(self) -> tuple[Any, ...]:
        cycle = [
            each and (each.element, each.number, each.elements.get_state()) for each in self._cycle
        ]
        return cycle, self._place, self._given, self._number, self._ended, super().get_state()

    def set_state(self, state: tuple[Any, ...]) -> None:
        cycle, self._place, self._given, self._number, self._ended, below = state
        super().set_state(below)
        for place, each in enumerate(cycle):
            if each is not None:
                element, number, within = each
                opened = self._made_of(element, number, place)
                opened.elements.set_state(within)
                self._cycle[place] = opened

    def close(self) -> None:
        super().close()
        for each in filter(None, self._cycle):
            each.elements.close()

    def goes_on(self, error: Exception) -> bool:
        return super().goes_on(error) and all(
            each.elements.goes_on(error) for each in filter(None, self._cycle)
        )

    def _open(self) -> None:
        """Fill the place in the cycle, or go on to the next if there is nothing more."""
        if not self._ended:
            try:
                element = next(self._parent)
            except StopIteration:
                self._ended = True
            else:
                self._cycle[self._place] = self._made_of(element, self._number, self._place)
                self._number += 1
                return
        self._advance()

    def _made_of(self, element: Any, number: int, place: int) -> _Open:
        node = call(self._node.function, element, "interleave")
        if place < self._node.ahead:
            node = Prefetch(node, self._node.block_length, self._node.ahead)
        return _Open(element, number, node.iterate(self._context.enter(number)))

    def _advance(self) -> None:
        self._place = (self._place + 1) % len(self._cycle)
        self._given = 0
