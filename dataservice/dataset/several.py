"""What nodes over several others have in common."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import ElementIterator, Node, NoElementError, Place, Reader
from dataservice.dataset.spec import Spec, alike, merged


class SeveralNode(Node):
    """A node over several others; attribute ``parents`` has them."""

    parents: tuple[Node, ...]

    def lengths(self) -> list[int] | None:
        """Return the lengths of the others if all are indexed; None if not."""
        lengths = [parent.indexed_length() for parent in self.parents]
        known = [length for length in lengths if length is not None]
        return known if len(known) == len(lengths) else None

    @property
    def same_every_epoch(self) -> bool:
        """Local. See :class:`Node`."""
        return all(parent.same_every_epoch for parent in self.parents)

    @property
    def distributed(self) -> bool:
        """Local. See :class:`Node`."""
        return any(parent.distributed for parent in self.parents)

    @property
    def on_device(self) -> bool:
        """Local. See :class:`Node`."""
        return any(parent.on_device for parent in self.parents)

    @property
    def has_static_spec(self) -> bool:
        """Local. See :class:`Node`."""
        return all(parent.has_static_spec for parent in self.parents)

    def sample(self) -> Node:
        """Return this node over the samples of the others; see :class:`Node`."""
        parents = tuple(parent.sample() for parent in self.parents)
        if all(one is other for one, other in zip(parents, self.parents, strict=True)):
            return self
        node: Node = dataclasses.replace(self, parents=parents)  # type: ignore[type-var]
        return node

    def summary(self) -> str:
        """Local. See :class:`Node`."""
        shown = [parent.summary() for parent in self.parents]
        return f"{type(self).__name__.lower()}({', '.join([*shown, *self.further()])})"

    def begin(self, context: Context) -> list[ElementIterator]:
        """Start a pass over each of the others."""
        return [
            parent.iterate(context.branch(number)) for number, parent in enumerate(self.parents)
        ]

    def further(self) -> list[str]:
        """Local. What the summary says besides, as text."""
        return []


def merged_spec(parents: Sequence[Node]) -> Spec:
    """Local. What the elements of several nodes are like.

    Raises:
        InvalidArgumentError: They differ in more than lengths.
        NoElementError: No node has an element to look at.
    """
    specs: list[Spec] = []
    nothing: NoElementError | None = None
    for parent in [each for each in parents if each.cardinality() != 0] or parents:
        try:
            specs.append(parent.element_spec())
        except NoElementError as error:
            nothing = error
    if not specs and nothing is not None:
        raise nothing
    return merged(specs)


def check_alike(method: str, nodes: Sequence[Node]) -> None:
    """Local. TypeError if nodes are known to have elements of different structure or dtype."""
    known: list[Spec] = []
    for node in nodes:
        with suppress(ValueError):  # a pass will tell
            if node.has_static_spec and node.cardinality() != 0:
                known.append(node.element_spec())
    for spec in known[1:]:
        if not alike(known[0], spec):
            raise TypeError(
                f"{method} needs datasets whose elements have the same structure and dtypes, "
                f"not {known[0]} and {spec}"
            )


class SeveralIterator(ElementIterator):
    """A pass over several passes, which all run at once.

    Args:
        passes: The passes.
    """

    def __init__(self, passes: Sequence[ElementIterator]) -> None:
        self._passes = passes

    def get_state(self) -> Any:
        """Local. See :class:`ElementIterator`; by default those of the passes."""
        return [each.get_state() for each in self._passes]

    def set_state(self, state: Any) -> None:
        """Local. See :class:`ElementIterator`."""
        for each, its in zip(self._passes, state, strict=True):
            each.set_state(its)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        for each in self._passes:
            each.close()

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return all(each.goes_on(error) for each in self._passes)


AT_ONCE = 64
"""How many places are divided among several nodes at once."""


class RoutedReader(Reader):
    """The elements at places in several indexed nodes.

    Args:
        nodes: The nodes.
        places: Which node, and where in it. They are taken ``AT_ONCE`` at a time, so that each node
            can read ahead among its own.
        context: What the pass depends on.
    """

    def __init__(
        self, nodes: Sequence[Node], places: Iterator[tuple[int, Place]], context: Context
    ) -> None:
        self._nodes = nodes
        self._places = places
        self._context = context
        self._coming: deque[int] = deque()
        self._readers: dict[int, ElementIterator] = {}

    def __next__(self) -> Any:
        if not self._coming:
            self._take()
        return next(self._readers[self._coming.popleft()])

    def _take(self) -> None:
        self.close()
        own: dict[int, list[Place]] = {}
        for number, place in islice(self._places, AT_ONCE):
            self._coming.append(number)
            own.setdefault(number, []).append(place)
        if not own:
            raise StopIteration
        for number, places in own.items():
            context = self._context.branch(number)
            self._readers[number] = self._nodes[number].read(iter(places), context)

    def close(self) -> None:
        """Close the readers of the nodes."""
        while self._readers:
            self._readers.popitem()[1].close()
