"""The transformations in which what becomes of an element depends on those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from dataservice.dataset.checks import check_callable, numbers, whole_or_none
from dataservice.dataset.groupings import Groupings
from dataservice.dataset.rejection_resample import RejectionResample
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

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Sequence[float],
        initial_dist: Sequence[float] | None = None,
        seed: int | None = None,
    ) -> Self:
        """Local. Elements with their classes, as (class, element), which are as frequent as wanted.

        Elements of classes that are more frequent are left out at random, as few as will do. Under
        ``"distributed_epoch"`` each worker draws, and counts the classes of what it has.

        Args:
            class_func: Gives the class of an element, from 0 on; it comes out as np.int64.
            target_dist: How frequent each class shall be, compared with the others.
            initial_dist: How frequent each is in this dataset, likewise; None: as is seen in the
                elements that have come.
            seed: Makes what is kept the same in every run.

        Raises:
            TypeError: The function is none, something no number, or the seed no whole one.
            ValueError: A number or the seed is negative, all numbers are 0, or those of
                ``initial_dist`` do not belong to these. During a pass (as InvalidArgumentError): a
                class is none.
        """
        name = "rejection_resample"
        check_callable(name, "class_func", class_func)
        target = tuple(numbers(name, "target_dist", target_dist))
        initial = None
        if initial_dist is not None:
            initial = tuple(numbers(name, "initial_dist", initial_dist))
        seed = whole_or_none(name, "seed", seed)
        return self.of(RejectionResample(self._node, class_func, target, initial, seed))
