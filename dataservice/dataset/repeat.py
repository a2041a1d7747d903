"""``Dataset.repeat``: the sequence several times, or for ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataservice.dataset.context import Context
from dataservice.dataset.node import INFINITE_CARDINALITY, ElementIterator, Node, UnaryNode


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

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        # Of a data service, a pass may be empty because other trainers have taken its elements.
        count = 0 if self.cardinality() == 0 else self.count
        ends = count is None and not self.parent.distributed
        return RepeatIterator(self.parent, context, count, ends)


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
        self._started = 0
        self._pass: ElementIterator | None = None

    def __next__(self) -> Any:
        while True:
            if self._pass is None:
                if self._is_over():
                    raise StopIteration
                self._started += 1
                self._some = False
                self._pass = self._parent.iterate(self._context.enter(self._started - 1))
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
        return self._context.received(self._context.enter(self._started - 1).passes)

    def get_state(self) -> tuple[int, bool, Any]:
        """Local. See :class:`ElementIterator`."""
        within = None if self._pass is None else (self._pass.get_state(),)
        return self._started, self._some, within

    def set_state(self, state: tuple[int, bool, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._started, self._some, within = state
        if within is not None:
            self._pass = self._parent.iterate(self._context.enter(self._started - 1))
            self._pass.set_state(within[0])

    def close(self) -> None:
        """Local. See :class:`ElementIterator`."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def goes_on(self, error: Exception) -> bool:
        """Local. See :class:`ElementIterator`."""
        return self._pass is not None and self._pass.goes_on(error)
