"""``Dataset.map`` of several elements at once, by threads or processes."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass
from typing import Any

from dataservice.dataset import tree
from dataservice.dataset.failure import Failure
from dataservice.dataset.functions import call
from dataservice.dataset.map import Map
from dataservice.dataset.node import Context, ElementIterator, Node, Scope, UnaryIterator
from dataservice.dataset.processes import Processes

# How often who waits for a function looks whether the pass has been given up.
_LOOK_S = 0.2


@dataclass(frozen=True)
class ParallelMap(Map):
    """A map that works on several elements at once.

    Attributes:
        parent: The node below.
        function: The function.
        calls: How many at once.
        deterministic: Whether elements stay in their order; otherwise who is ready goes first.
        processes: Whether the function runs in processes in place of threads.
    """

    parent: Node
    function: Callable[..., Any]
    calls: int
    deterministic: bool
    processes: bool

    def __post_init__(self) -> None:
        if self.calls < 1:
            raise ValueError(f"map needs num_parallel_calls of at least 1, not {self.calls}")
        self.check_not_on_device("map with num_parallel_calls")

    @property
    def one_to_one(self) -> bool:
        """Local. See :class:`Node`."""
        return self.deterministic and super().one_to_one

    def iterate(self, context: Context) -> ElementIterator:
        """Local. See :class:`Node`."""
        return ParallelMapIterator(self, context)


class ParallelMapIterator(UnaryIterator):
    """One pass; holds the elements that functions are at work on, or have finished with."""

    def __init__(self, node: ParallelMap, context: Context) -> None:
        super().__init__(node.parent.iterate(context))
        self._node = node
        self._scope = context.scope or Scope()
        self._pending: deque[tuple[Any, Future[Any]]] = deque()
        self._ended = False
        self._workers = _Workers(node)
        self._finalizer = weakref.finalize(self, self._workers.close)

    def __next__(self) -> Any:
        while len(self._pending) < self._node.calls and not self._ended:
            try:
                self._begin(next(self._parent))
            except StopIteration:
                self._ended = True
            except Exception as error:  # keeps its place among the elements
                self._begin(Failure(error))
        if not self._pending:
            raise StopIteration
        number = 0 if self._node.deterministic else self._first_ready()
        future = self._pending[number][1]
        while not future.done():
            concurrent.futures.wait([future], _LOOK_S)
            if self._scope.closed:
                raise StopIteration
        del self._pending[number]
        try:
            return future.result()
        finally:
            del future  # the traceback of its error refers to this frame

    def get_state(self) -> tuple[list[Any], bool, Any]:
        """Local. See :class:`ElementIterator`; what functions are at work on is begun again."""
        return [element for element, _ in self._pending], self._ended, super().get_state()

    def set_state(self, state: tuple[list[Any], bool, Any]) -> None:
        """Local. See :class:`ElementIterator`."""
        elements, self._ended, below = state
        super().set_state(below)
        for element in elements:
            self._begin(element)

    def close(self) -> None:
        """Local. See :class:`ElementIterator`; a function in a thread is not waited for."""
        self._pending.clear()
        self._ended = True
        self._finalizer()
        super().close()

    def _begin(self, element: Any) -> None:
        if isinstance(element, Failure):
            future: Future[Any] = Future()
            future.set_exception(element.error)
        else:
            future = self._workers.submit(element)
        self._pending.append((element, future))

    def _first_ready(self) -> int:
        futures = [future for _, future in self._pending]
        while not any(future.done() for future in futures):
            concurrent.futures.wait(futures, _LOOK_S, FIRST_COMPLETED)
            if self._scope.closed:
                raise StopIteration
        return next(number for number, future in enumerate(futures) if future.done())


class _Workers:
    """The threads of a pass, and their processes; they know nothing of the pass itself.

    The threads are daemons, so that a function that hangs does not keep Python from ending.
    """

    def __init__(self, node: ParallelMap) -> None:
        self._function = node.function
        self._processes = Processes(node.function, node.calls) if node.processes else None
        self._calls = node.calls
        self._work: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._started = 0
        self._closed = False

    def submit(self, element: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((element, future))
        if self._started < self._calls:
            self._started += 1
            threading.Thread(target=self._run, name="dataservice-map", daemon=True).start()
        return future

    def close(self) -> None:
        self._closed = True
        for _ in range(self._started):
            self._work.put(None)
        if self._processes is not None:
            self._processes.close()

    def _run(self) -> None:
        while (item := self._work.get()) is not None and not self._closed:
            element, future = item
            try:
                future.set_result(_mapped(self._processes or self._function, element))
            except BaseException as error:
                future.set_exception(error)
            # Who waits for work keeps nothing; and an error's traceback refers to this frame.
            del item, element, future


def _mapped(function: Callable[..., Any], element: Any) -> Any:
    return tree.to_numpy(call(function, element, "map"))
