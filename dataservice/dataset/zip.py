"""``Dataset.zip``: one element of each of several datasets, until one of them ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.context import Context
from dataservice.dataset.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    ElementIterator,
    Node,
    Place,
)
from dataservice.dataset.several import SeveralIterator, SeveralNode
from dataservice.dataset.spec import Spec


@dataclass(frozen=True)
class Zip(SeveralNode):
    """Attributes: the nodes, and the structure of elements, with anything in place of leaves."""

    parents: tuple[Node, ...]
    structure: Any

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        counts = [parent.cardinality() for parent in self.parents]
        finite = [count for count in counts if count != INFINITE_CARDINALITY]
        if 0 in finite:
            return 0
        if UNKNOWN_CARDINALITY in finite:
            return UNKNOWN_CARDINALITY
        return min(finite, default=INFINITE_CARDINALITY)

    def indexed_length(self) -> int | None:
        """Return the smallest of the lengths; see :class:`Node`."""
        lengths = self.lengths()
        return None if lengths is None else min(lengths)

    def source_length(self) -> int:
        """Return the number of elements; see :class:`Node`."""
        length = self.indexed_length()
        if length is None:
            raise self.cannot_be_split(
                "elements that belong together would go to different workers; call zip before "
                "transformations that drop, flatten or group elements"
            )
        return length

    def element_spec(self) -> Spec:
        """Local. See :class:`Node`."""
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
        if self._over:  # those that are longer have more
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
        """Local. See :class:`ElementIterator`."""
        return self._over, super().get_state()

    def set_state(self, state: tuple[bool, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
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
