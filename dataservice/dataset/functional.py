"""The transformations that apply functions to elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from dataservice.dataset.autotune import AUTOTUNE, CYCLE_LENGTH
from dataservice.dataset.checks import check_callable, only_one, whole, whole_or_none
from dataservice.dataset.described import Described
from dataservice.dataset.filter import Filter
from dataservice.dataset.interleave import Interleave
from dataservice.dataset.made_nodes import node_of
from dataservice.dataset.map import Map
from dataservice.dataset.parallel_map import ParallelMap


class Functional(Described):
    """The transformations that get a function of an element."""

    def map(
        self,
        function: Callable[..., Any] | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = True,
        processes: bool = False,
        *,
        map_func: Callable[..., Any] | None = None,
    ) -> Self:
        """Local. A function of each element.

        Args:
            function: Gets the element, or the members of a tuple as its arguments. Numbers,
                strings, lists and memoryviews in its result become NumPy's.
            num_parallel_calls: How many elements it works on at once, in threads; AUTOTUNE: as
                many as there are cores where it runs. By default it is called by who asks for
                elements.
            deterministic: Whether elements stay in their order, as they do under None; otherwise
                who is ready goes first, but on workers of a service, where others may have to go
                on.
            processes: Run it in processes in place of threads, for functions that Python's lock
                would hold up. They get the function by cloudpickle, and share no memory.
            map_func: Another name of ``function``.

        Raises:
            TypeError: The function is none, or the number no whole one.
            ValueError: ``num_parallel_calls`` is below 1, or missing for processes. During a pass
                (as InvalidArgumentError): the function gives None.
        """
        function = only_one("map", function=function, map_func=map_func)
        check_callable("map", "function", function)
        calls = whole_or_none("map", "num_parallel_calls", num_parallel_calls)
        if calls is None:
            if processes:
                raise ValueError("map needs num_parallel_calls, the number of its processes")
            return self.of(Map(self._node, function))
        in_order = deterministic is None or deterministic
        return self.of(ParallelMap(self._node, function, calls, in_order, processes))

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Local. The elements that a function says True of.

        Args:
            predicate: Gets the element, or the members of a tuple as its arguments.

        Raises:
            TypeError: It is no function.
            ValueError: During a pass (as InvalidArgumentError): it gives no bool, nor a whole
                number.
        """
        return self.of(Filter(self._node, check_callable("filter", "predicate", predicate)))

    def interleave(
        self,
        map_func: Callable[..., Described],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Local. The elements of the datasets that elements become, some of these in turn.

        Args:
            map_func: Makes a dataset of an element.
            cycle_length: How many datasets take turns; None or AUTOTUNE: 16.
            block_length: How many elements each gives in its turn; None: one.
            num_parallel_calls: How many of them make the elements of their next turn ahead, in a
                thread each; AUTOTUNE: all. The order stays. By default elements are made by who
                asks for them.
            deterministic: Taken, and without effect: the order is always kept.

        Raises:
            TypeError: The function is none, or a number no whole one.
            ValueError: A number is below 1, or there are more calls than datasets that take turns.
        """
        cycle = whole_or_none("interleave", "cycle_length", cycle_length)
        cycle = CYCLE_LENGTH if cycle in (None, AUTOTUNE) else cycle
        block = 1 if block_length is None else whole("interleave", "block_length", block_length)
        calls = whole_or_none("interleave", "num_parallel_calls", num_parallel_calls)
        if calls is not None and calls != AUTOTUNE and not 1 <= calls <= cycle:
            raise ValueError(
                "interleave needs num_parallel_calls from 1 to cycle_length, or AUTOTUNE, not "
                f"{calls} of {cycle}"
            )
        ahead = cycle if calls == AUTOTUNE else calls or 0
        function = node_of("interleave", "map_func", map_func)
        return self.of(Interleave(self._node, function, cycle, block, ahead))

    def flat_map(self, map_func: Callable[..., Described]) -> Self:
        """Local. The elements of the datasets that elements become, one after the other.

        Args:
            map_func: Makes a dataset of an element.

        Raises:
            TypeError: It is no function.
        """
        return self.of(Interleave(self._node, node_of("flat_map", "map_func", map_func), 1, 1))
