"""The transformations in which what becomes of an element depends on those before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from dataservice.dataset.checks import check_callable
from dataservice.dataset.groupings import Groupings
from dataservice.dataset.scan import Scan
from dataservice.dataset.take_while import TakeWhile
from dataservice.dataset.unique import Unique


class InOrder(Groupings):
    """The transformations that go by the order of elements."""

    def take_while(self, predicate: Callable[..., Any]) -> Self:
        """Local. The elements before the first that a function says False of.

        Workers cannot share the source: under ``"distributed_epoch"`` it goes after ``distribute``.

        Args:
            predicate: Gets the element, or the members of a tuple as its arguments.

        Raises:
            TypeError: It is no function.
            ValueError: During a pass (as InvalidArgumentError): it gives no bool, nor a whole
                number.
        """
        check_callable("take_while", "predicate", predicate)
        return self.of(TakeWhile(self._node, predicate))

    def scan(self, initial_state: Any, scan_func: Callable[[Any, Any], tuple[Any, Any]]) -> Self:
        """Local. What a function makes of a state and one element after the other.

        Workers cannot share the source: under ``"distributed_epoch"`` it goes after ``distribute``.

        Args:
            initial_state: The state before the first element: a number, text or array, or a dict or
                tuple of them, nested. It is copied, and so is each later one; arrays in it cannot
                be written into.
            scan_func: Gets a state and an element, and gives the next state and the element that
                takes the place of that one. Numbers, strings and lists in them become NumPy's.

        Raises:
            TypeError: It is no function.
            ValueError: During a pass (as InvalidArgumentError): it gives no pair, or None for an
                element.
        """
        check_callable("scan", "scan_func", scan_func)
        return self.of(Scan.of(self._node, initial_state, scan_func))

    def unique(self) -> Self:
        """Local. Each element once, where it comes first.

        Elements are equal if their arrays have the same dtypes, shapes and bytes, or the same text.
        Of each that has come 16 bytes are kept, and are in the states of the pass. Workers cannot
        share the source: under ``"distributed_epoch"`` it goes after ``distribute``.

        Raises:
            ValueError: During a pass (as InvalidArgumentError): an element has something else than
                arrays, numbers and text.
        """
        return self.of(Unique(self._node))
