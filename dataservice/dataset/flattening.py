"""Elements that become datasets: ``interleave``, ``flat_map``, ``group_by_window``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataservice.dataset import tree
from dataservice.dataset.base import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    FunctionNode,
    Node,
    UnaryIterator,
)
from dataservice.dataset.execution import Prefetch
from dataservice.dataset.indexed import InMemory
from mpidist.errors import InvalidArgumentError


class Samples:
    """A function that makes the samples of the nodes that another function makes.

    Args:
        function: The other function.
    """

    def __init__(self, function: Callable[..., Node]) -> None:
        self._function = function
        self.__qualname__ = tree.name_of(function)

    def __call__(self, *arguments: Any) -> Node:
        """Return the sample of the node that the other function makes."""
        return self._function(*arguments).sample()


@dataclass(frozen=True)
class Interleave(FunctionNode):
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

    def sample(self) -> Node:
        # A dataset that is read ahead computes more than the first element.
        return dataclasses.replace(
            self, parent=self.parent.sample(), function=Samples(self.function), ahead=0
        )

    def _iterate(self, context: Context) -> ElementIterator:
        return InterleaveIterator(self, context)


@dataclass
class _OpenDataset:
    """Attributes: an element of the node below, its number, and the pass over its dataset."""

    element: Any
    number: int
    elements: ElementIterator


class InterleaveIterator(UnaryIterator):
    """One pass; holds an element of the pass below for each dataset that is open.

    The order is the order of TensorFlow's ``interleave``: a dataset that has ended leaves its
    place, which is filled when its turn comes again.
    """

    def __init__(self, node: Interleave, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        # Workers share the pass below.
        self._context = context.alone()
        self._cycle: list[_OpenDataset | None] = [None] * node.cycle_length
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

    def _made_of(self, element: Any, number: int, place: int) -> _OpenDataset:
        node = tree.call(self._node.function, element, "interleave")
        if place < self._node.ahead:
            node = Prefetch(node, self._node.block_length, self._node.ahead)
        return _OpenDataset(element, number, node.iterate(self._context.enter(number)))

    def _advance(self) -> None:
        self._place = (self._place + 1) % len(self._cycle)
        self._given = 0


@dataclass(frozen=True)
class GroupByWindow(FunctionNode):
    """Groups elements by their keys, and yields the elements of a dataset made of each full group.

    Attributes:
        parent: The node below.
        key: Returns the key of the group of an element.
        reduce: Makes a node of a key and a dataset of the elements of its group.
        window_size: The number of elements that fill a group, or a function of the key.
        make: Makes a Dataset of a node.
    """

    parent: Node
    key: Callable[..., Any]
    reduce: Callable[..., Node]
    window_size: int | Callable[[np.int64], Any]
    make: Callable[[Node], Any] = field(repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.window_size, int) and self.window_size < 1:
            raise ValueError(
                f"group_by_window needs a window_size of at least 1, not {self.window_size}"
            )

    def cardinality(self) -> int:
        count = self.parent.cardinality()
        return count if count in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def sample(self) -> Node:
        return dataclasses.replace(self, parent=self.parent.sample(), reduce=Samples(self.reduce))

    def _iterate(self, context: Context) -> ElementIterator:
        return GroupByWindowIterator(self, context)

    def key_of(self, element: Any) -> int:
        """Return the key of the group that an element belongs to."""
        return tree.call_int(self.key, element, "group_by_window")

    def size_of(self, key: int) -> int:
        """Return the number of elements that fill the group of a key."""
        if isinstance(self.window_size, int):
            return self.window_size
        size = tree.call_int(self.window_size, np.int64(key), "group_by_window")
        if size < 1:
            raise InvalidArgumentError(
                f"group_by_window needs windows of at least 1 element, not {size} for key {key}"
            )
        return size


@dataclass
class _OpenGroup:
    """Attributes: a full group, its number, and the pass over the dataset made of it."""

    key: int
    elements: list[Any]
    number: int
    made: ElementIterator


class GroupByWindowIterator(UnaryIterator):
    """One pass; holds the groups that are not full, and the full group that it yields now.

    The order is TensorFlow's. Groups that are not full at the end come in the order of keys.
    """

    def __init__(self, node: GroupByWindow, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        # Workers share the pass below.
        self._context = context.alone()
        self._groups: dict[int, list[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._number = 0  # of the next group that is full
        self._current: _OpenGroup | None = None
        self._ended = False

    def __next__(self) -> Any:
        while True:
            if self._current is None:
                self._open(self._next_key())
            assert self._current is not None
            try:
                return next(self._current.made)
            except StopIteration:
                self._current.made.close()
                self._current = None

    def get_state(self) -> tuple[Any, ...]:
        groups = {key: list(elements) for key, elements in self._groups.items()}
        current = self._current and (
            self._current.key,
            self._current.elements,
            self._current.number,
            self._current.made.get_state(),
        )
        below = super().get_state()
        return groups, dict(self._sizes), self._number, current, self._ended, below

    def set_state(self, state: tuple[Any, ...]) -> None:
        groups, sizes, self._number, current, self._ended, below = state
        self._groups = {key: list(elements) for key, elements in groups.items()}
        self._sizes = dict(sizes)
        super().set_state(below)
        if current is not None:
            *group, within = current
            self._current = self._made_of(*group)
            self._current.made.set_state(within)

    def close(self) -> None:
        super().close()
        if self._current is not None:
            self._current.made.close()

    def goes_on(self, error: Exception) -> bool:
        return super().goes_on(error) and (
            self._current is None or self._current.made.goes_on(error)
        )

    def _next_key(self) -> int:
        """Return the key of the next group. Raise StopIteration if there is none."""
        while not self._ended:
            try:
                element = next(self._parent)
            except StopIteration:
                self._ended = True
                break
            key = self._node.key_of(element)
            if key not in self._sizes:
                self._sizes[key] = self._node.size_of(key)
            group = self._groups.setdefault(key, [])
            group.append(element)
            if len(group) == self._sizes[key]:
                return key
        if not self._groups:
            raise StopIteration
        return min(self._groups)

    def _open(self, key: int) -> None:
        elements, number = self._groups.pop(key), self._number
        self._number += 1
        self._current = self._made_of(key, elements, number)

    def _made_of(self, key: int, elements: list[Any], number: int) -> _OpenGroup:
        group = self._node.make(InMemory(elements))
        node = tree.call(self._node.reduce, (np.int64(key), group), "group_by_window")
        return _OpenGroup(key, elements, number, node.iterate(self._context.enter(number)))
