"""``Dataset.map`` of several elements at once, by threads or processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.autotune import AUTOTUNE, usable_cores
from dataservice.dataset.context import Context
from dataservice.dataset.execution import CALLS, ReadAhead
from dataservice.dataset.failure import Failure
from dataservice.dataset.map import Map, mapped
from dataservice.dataset.node import ElementIterator, Node, Place, UnaryIterator
from dataservice.dataset.processes import RemoteFunction

# Elements for each function at once: one that it works on, one that it takes up next or has ready.
_AHEAD = 2


@dataclass(frozen=True)
class ParallelMap(Map):
    """A map that works on several elements at once.

    Attributes:
        parent: The node below.
        function: The function.
        calls: The number of calls at a time; AUTOTUNE stands for the number of cores at the pass.
        deterministic: Whether elements stay in their order; otherwise ready ones go first.
            None, which :class:`Options` may replace, means True.
        processes: Whether the function runs in processes in place of threads.
    """

    parent: Node
    function: Callable[..., Any]
    calls: int
    deterministic: bool | None
    processes: bool

    def __post_init__(self) -> None:
        if self.calls < 1 and self.calls != AUTOTUNE:
            raise ValueError(
                f"map needs num_parallel_calls of at least 1, or AUTOTUNE, not {self.calls}"
            )
        self.check_not_on_device("map with num_parallel_calls")

    def indexed_length(self) -> int | None:
        return None if self.deterministic is False else super().indexed_length()

    def sample(self) -> Node:
        # A parallel pass begins 2 * calls elements before the first one is taken.
        return Map(self.parent.sample(), self.function)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return ParallelMapIterator(self, self.parent.read(places, context), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return ParallelMapIterator(self, self.parent.iterate(context), context)


class ParallelMapIterator(UnaryIterator):
    """One pass; holds the elements in work and the finished ones."""

    def __init__(self, node: ParallelMap, parent: ElementIterator, context: Context) -> None:
        super().__init__(parent)
        self._calls = usable_cores() if node.calls == AUTOTUNE else node.calls
        self._ended = False
        self._remote = RemoteFunction(node.function, self._calls) if node.processes else None
        if self._remote is not None:
            weakref.finalize(self, self._remote.close)
        function = self._remote or node.function
        self._ahead = ReadAhead(
            lambda element: mapped(function, element, node.function),
            self._calls,
            CALLS,
            context.scope,
            in_order=node.deterministic is not False or context.numbered,
        )

    def __next__(self) -> Any:
        while len(self._ahead) < _AHEAD * self._calls and not self._ended:
            try:
                element = next(self._parent)
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._ahead.add(Failure(error))  # keeps its place among the elements
            else:
                self._ahead.add(element)
        return self._ahead.take()

    def get_state(self) -> tuple[list[Any], bool, Any]:
        # The calls that are running are made again.
        elements = [call.element for call in self._ahead.calls()]
        return elements, self._ended, super().get_state()

    def set_state(self, state: tuple[list[Any], bool, Any]) -> None:
        elements, self._ended, below = state
        super().set_state(below)
        for element in elements:
            self._ahead.add(element)

    def close(self) -> None:
        # A function in a thread is not waited for.
        self._ended = True
        self._ahead.close()
        if self._remote is not None:
            self._remote.close()
        super().close()
