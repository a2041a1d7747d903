"""Datasets over several others: ``zip`` and ``concatenate``."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.base import (
    ENDLESS,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Context,
    ElementIterator,
    Node,
    NoElementError,
    Place,
    Reader,
    SuccessivePasses,
    UnaryNode,
)
from dataservice.dataset.indexed import Repeat
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
        return all(parent.same_every_epoch for parent in self.parents)

    @property
    def distributed(self) -> bool:
        return any(parent.distributed for parent in self.parents)

    @property
    def on_device(self) -> bool:
        return any(parent.on_device for parent in self.parents)

    @property
    def has_static_spec(self) -> bool:
        return all(parent.has_static_spec for parent in self.parents)

    def summary(self) -> str:
        shown = [parent.summary() for parent in self.parents]
        return f"{self.method_name()}({', '.join([*shown, *self.further()])})"

    def begin(self, context: Context) -> list[ElementIterator]:
        """Start a pass over each of the others."""
        return [
            parent.iterate(context.branch(number)) for number, parent in enumerate(self.parents)
        ]

    def further(self) -> list[str]:
        """Return the arguments, as text, that the summary shows after the nodes."""
        return []


def merged_spec(parents: Sequence[Node]) -> Spec:
    """Return the spec of the elements of several nodes.

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
    """Raise TypeError if nodes are known to have elements of different structure or dtype."""
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
        return [each.get_state() for each in self._passes]

    def set_state(self, state: Any) -> None:
        for each, its in zip(self._passes, state, strict=True):
            each.set_state(its)

    def close(self) -> None:
        for each in self._passes:
            each.close()

    def goes_on(self, error: Exception) -> bool:
        return all(each.goes_on(error) for each in self._passes)


AT_ONCE = 64
"""How many places are divided among several nodes at once."""


class RoutedReader(Reader):
    """The elements at places in several indexed nodes.

    Args:
        nodes: The nodes.
        places: Which node, and where in it. They are taken ``AT_ONCE`` at a time, so that each node
            can read ahead among its own.
        context: The context of the pass.
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


@dataclass(frozen=True)
class Zip(SeveralNode):
    """Attributes: the nodes, and the structure of elements, with anything in place of leaves."""

    parents: tuple[Node, ...]
    structure: Any

    def cardinality(self) -> int:
        counts = [parent.cardinality() for parent in self.parents]
        finite = [count for count in counts if count != INFINITE_CARDINALITY]
        if 0 in finite:
            return 0
        if UNKNOWN_CARDINALITY in finite:
            return UNKNOWN_CARDINALITY
        return min(finite, default=INFINITE_CARDINALITY)

    def indexed_length(self) -> int | None:
        lengths = self.lengths()
        return None if lengths is None else min(lengths)

    def source_length(self) -> int:
        return self.indexed_only(
            "elements that belong together would go to different workers; call zip before "
            "transformations that drop, flatten or group elements, and before a small shuffle"
        )

    def element_spec(self) -> Spec:
        specs = [parent.element_spec() for parent in self.parents]
        return tree.unflatten(self.structure, specs)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        forks = forked(places, len(self.parents))
        passes = [
            parent.read(fork, context.branch(number))
            for number, (parent, fork) in enumerate(zip(self.parents, forks, strict=True))
        ]
        return ZipIterator(self.structure, passes)

    def _iterate(self, context: Context) -> ElementIterator:
        return ZipIterator(self.structure, self.begin(context))


class ZipIterator(SeveralIterator):
    """One pass."""

    def __init__(self, structure: Any, passes: Sequence[ElementIterator]) -> None:
        super().__init__(passes)
        self._structure = structure
        self._over = False

    def __next__(self) -> Any:
        if self._over:  # longer passes have more elements
            raise StopIteration
        elements, failed = [], None
        for each in self._passes:
            try:
                elements.append(next(each))
            except StopIteration:
                self._over = True
                raise
            except Exception as error:  # the others go on too, to stay in step
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # its traceback refers to this frame
        return tree.unflatten(self._structure, elements)

    def get_state(self) -> tuple[bool, Any]:
        return self._over, super().get_state()

    def set_state(self, state: tuple[bool, Any]) -> None:
        self._over, below = state
        super().set_state(below)


class _Source:
    """Places that several iterators take, each of them all."""

    def __init__(self, places: Iterator[Place], queues: Sequence[deque[Place]]) -> None:
        self._places = places
        self._queues = queues
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def take(self, queue: deque[Place]) -> Place | None:
        """Return the next place of one of the iterators; None at the end."""
        with self._lock:
            if not queue:
                place = self._next()
                if place is None:
                    return None
                for each in self._queues:
                    each.append(place)
            return queue.popleft()

    def _next(self) -> Place | None:
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._places, None)
        except BaseException as error:  # for all iterators, none of which may take it for an end
            self._failure = error
            raise


def forked(places: Iterator[Place], count: int) -> list[Iterator[Place]]:
    """Return iterators over the same places, which may be used on different threads."""
    queues: list[deque[Place]] = [deque() for _ in range(count)]
    source = _Source(places, queues)
    return [iter(partial(source.take, queue), None) for queue in queues]


@dataclass(frozen=True)
class Concatenate(SeveralNode):
    """Attributes: the nodes, in order."""

    parents: tuple[Node, ...]

    def cardinality(self) -> int:
        counts = [parent.cardinality() for parent in self.parents]
        if INFINITE_CARDINALITY in counts:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if UNKNOWN_CARDINALITY in counts else sum(counts)

    def indexed_length(self) -> int | None:
        lengths = self.lengths()
        return None if lengths is None else min(sum(lengths), ENDLESS)

    def source_length(self) -> int:
        length = self.indexed_length()
        if length is not None:
            return length
        if any(_repeats(parent) for parent in self.parents):
            raise self.cannot_be_split("one of its parts is repeated, and only the whole can be")
        return sum(parent.source_length() for parent in self.parents)

    def element_spec(self) -> Spec:
        return merged_spec(self.parents)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        lengths = self.lengths()
        assert lengths is not None
        firsts = [0, *itertools.accumulate(lengths)]
        routed = (
            (number := bisect_right(firsts, index) - 1, (epoch, index - firsts[number]))
            for epoch, index in places
        )
        return RoutedReader(self.parents, routed, context)

    def _iterate(self, context: Context) -> ElementIterator:
        return ConcatenateIterator(self.parents, context)


class ConcatenateIterator(SuccessivePasses):
    """One pass; the passes below begin one after the other."""

    def __init__(self, parents: tuple[Node, ...], context: Context) -> None:
        super().__init__()
        self._parents = parents
        self._context = context
        self._begun = 0

    def __next__(self) -> Any:
        while True:
            if self._pass is None:
                self._begin()
            assert self._pass is not None
            try:
                return next(self._pass)
            except StopIteration:
                self.close()

    def get_state(self) -> tuple[int, Any]:
        return self._begun, None if self._pass is None else (self._pass.get_state(),)

    def set_state(self, state: tuple[int, Any]) -> None:
        self._begun, within = state
        if within is not None:
            self._begun -= 1
            self._begin()
            assert self._pass is not None
            self._pass.set_state(within[0])

    def _begin(self) -> None:
        if self._begun == len(self._parents):
            raise StopIteration
        parent, context = self._parents[self._begun], self._context.branch(self._begun)
        share = context.share
        if share is not None:
            before = sum(each.source_length() for each in self._parents[: self._begun])
            share = replace(share, offset=share.offset + before)
            context = replace(context, share=share)
        self._begun += 1
        self._pass = parent.iterate(context)


def _repeats(node: Node) -> bool:
    """Return whether passes over a sequential node are several passes over its source."""
    if node.indexed_length() is not None:
        return False
    while isinstance(node, UnaryNode) and not isinstance(node, Repeat):
        node = node.parent
    return isinstance(node, Repeat)
