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
        # A pass may come out empty although there are elements, because others took them; only
        # a sequence that is empty by description ends an endless repetition.
        return RepeatIterator(self.parent, context, 0 if self.cardinality() == 0 else self.count)


class RepeatIterator(ElementIterator):
    """Passes, one after the other."""

    def __init__(self, parent: Node, context: Context, count: int | None) -> None:
        self._parent = parent
        self._context = context
        self._count = count
        self._started = 0
        self._pass: ElementIterator | None = None

    def __next__(self) -> Any:
        while True:
            if self._pass is None:
                scope = self._context.scope
                if self._started == self._count or (scope is not None and scope.closed):
                    raise StopIteration
                self._started += 1
                self._pass = self._parent.iterate(self._context.enter(self._started - 1))
            try:
                return next(self._pass)
            except StopIteration:
                self.close()

    def get_state(self) -> tuple[int, Any]:
        """Local. See :class:`ElementIterator`."""
        return self._started, None if self._pass is None else (self._pass.get_state(),)

    def set_state(self, state: tuple[int, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        self._started, within = state
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
