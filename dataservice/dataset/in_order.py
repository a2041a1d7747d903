"""The transformations in which what becomes of an element depends on those before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from dataservice.dataset.checks import check_callable
from dataservice.dataset.groupings import Groupings
from dataservice.dataset.take_while import TakeWhile


class InOrder(Groupings):
    """The transformations that go by the order of elements."""

    def take_while(self, predicate: Callable[..., Any]) -> Self:
        """Local. The elements before the first that a function says False of.

        Workers cannot share the source: under ``"distributed_epoch"`` it goes after ``distribute``.

        Args:
            predicate: Gets the element, or the members of a tuple as its arguments, and gives a
                bool.

        Raises:
            TypeError: It is no function. During a pass: it gave no bool.
        """
        check_callable("take_while", "predicate", predicate)
        return self.of(TakeWhile(self._node, predicate))
