"""``Dataset.repeat``: the sequence several times, or for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context, pass_epoch
from dataservice.dataset.node import (
    ENDLESS,
    INFINITE_CARDINALITY,
    ElementIterator,
    Node,
    Place,
    UnaryNode,
)


@dataclass(frozen=True)
class Repeat(UnaryNode):
    """Attributes: the node below, and how often; None repeats for ever."""

    parent: Node
    count: int | None

    def cardinality(self) -> int:
        """Local. See :class:`Node`."""
        once = self.parent.cardinality()
        if self.count == 0 or once == 0:
            return 0
        if self.count is None:
            return INFINITE_CARDINALITY
        return once if once < 0 else once * self.count

    def indexed_length(self) -> int | None:
        """Return the length of all passes together; see :class:`Node`."""
        once = self.parent.indexed_length()
        if once is None or once == 0:
            return once
        return ENDLESS if self.count is None else min(once * self.count, ENDLESS)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        once = self.parent.indexed_length()
        assert once is not None
        return self.parent.read(_places_in_passes(places, once, self.count), context)

    def _iterate(self, context: Context) -> ElementIterator:
        # Of a data service, a pass may be empty because other trainers have taken its elements.
        count = 0 if self.cardinality() == 0 else self.count
        ends = count is None and not self.parent.distributed
        return RepeatIterator(self.parent, context, count, ends)


def _places_in_passes(places: Iterator[Place], once: int, count: int | None) -> Iterator[Place]:
    """Yield the places in the node below, each pass over which is an epoch."""
    for epoch, index in places:
        number, within = divmod(index, once)
        yield pass_epoch(epoch, number, count), within


class RepeatIterator(ElementIterator):
    """Passes, one after the other.

    Args:
        parent: The node below.
        context: Of the whole.
        count: How many; None: no end of them.
        needs_some: Whether a pass without elements is the last, as in tf.data.
    """

    def __init__(self, parent: Node, context: Context, count: int | None, needs_some: bool) -> None:
        self._parent = parent
        self._context = context
        self._count = count
        self._needs_some = needs_some
        self._some = False  # the pass has given elements, or errors in their places
        self._first = 0  # position where the pass began
        self._started = 0
        self._pass: ElementIterator | None = None

    def __next__(self) -> Any:
        while True:
            if self._pass is None:
                if self._is_over():
                    raise StopIteration
                self._started += 1
                self._some = False
                self._first = self._place()
                self._pass = self._begin()
            try:
                element = next(self._pass)
            except StopIteration:
                self.close()
            except Exception:
                self._some = True
                raise
            else:
                self._some = True
                return element

    def _is_over(self) -> bool:
        scope = self._context.scope
        if self._started == self._count or (scope is not None and scope.closed):
            return True
        if not self._needs_some or self._started == 0 or self._some:
            return False
        # A pass whose source indices went to other workers says nothing about this one's.
        return self._context.share is None or self._place() > self._first

    def _place(self) -> int:
        """Return the position where the next pass over the source begins."""
        return 0 if self._context.share is None else self._context.share.splits.start

    def _begin(self) -> ElementIterator:
        return self._parent.iterate(self._context.enter(self._started - 1, self._count))

    def get_state(self) -> tuple[int, bool, int, Any]:
        """Local. See :class:`ElementIterator`."""
        within = None if self._pass is None else (self._pass.get_state(),)
        return self._started, self._some, self._first, within

    def set_state(self, state: tuple[int, bool, int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._started, self._some, self._first, within = state
        if within is not None:
            self._pass = self._begin()
            self._pass.set_state(within[0])

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return self._pass is not None and self._pass.goes_on(error)
