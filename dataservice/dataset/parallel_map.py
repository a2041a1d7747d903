"""``Dataset.map`` of several elements at once, by threads or processes."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dataservice.dataset.autotune import AUTOTUNE, usable_cores
from dataservice.dataset.context import Context, Scope
from dataservice.dataset.failure import Failure
from dataservice.dataset.map import Map, mapped
from dataservice.dataset.node import ElementIterator, Node, Place, UnaryIterator
from dataservice.dataset.processes import Processes

# How often who waits for a function looks whether the pass has been given up.
_LOOK_S = 0.2
# Elements for each function at once: one that it works on, one that it takes up next or has ready.
_AHEAD = 2


@dataclass(frozen=True)
class ParallelMap(Map):
    """A map that works on several elements at once.

    Attributes:
        parent: The node below.
        function: The function.
        calls: How many at once; AUTOTUNE: as there are cores where the pass is.
        deterministic: Whether elements stay in their order; otherwise who is ready goes first.
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
        """Return the length of the node below if elements stay in order; see :class:`Node`."""
        return None if self.deterministic is False else super().indexed_length()

    def sample(self) -> Node:
        """Return a node that computes its first element alone; see :class:`Node`."""
        # A parallel pass begins 2 * calls elements before the first one is taken.
        return Map(self.parent.sample(), self.function)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return ParallelMapIterator(self, self.parent.read(places, context), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return ParallelMapIterator(self, self.parent.iterate(context), context)


class ParallelMapIterator(UnaryIterator):
    """One pass; holds the elements that functions are at work on, or have finished with."""

    def __init__(self, node: ParallelMap, parent: ElementIterator, context: Context) -> None:
        super().__init__(parent)
        self._scope = context.scope or Scope()
        self._in_order = node.deterministic is not False or context.numbered
        self._pending: deque[_Call] = deque()
        self._ended = False
        self._calls = usable_cores() if node.calls == AUTOTUNE else node.calls
        self._workers = _Workers(node, self._calls)
        self._finalizer = weakref.finalize(self, self._workers.close)

    def __next__(self) -> Any:
        while len(self._pending) < _AHEAD * self._calls and not self._ended:
            try:
                self._begin(next(self._parent))
            except StopIteration:
                self._ended = True
            except Exception as error:  # keeps its place among the elements
                self._begin(Failure(error))
        if not self._pending:
            raise StopIteration
        call = self._pending[0] if self._in_order else self._first_ready()
        while not call.done:
            call.wait(_LOOK_S)
            if self._scope.closed:
                raise StopIteration
        self._pending.remove(call)
        if call.error is None:
            return call.value
        try:
            raise call.error
        finally:
            del call  # the traceback of its error refers to this frame

    def get_state(self) -> tuple[list[Any], bool, Any]:
        """Local. See :class:`ElementIterator`; what functions are at work on is begun again."""
        pending = list(self._pending)  # at once: another thread may be reading
        return [call.element for call in pending], self._ended, super().get_state()

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
        call = _Call(element)
        if isinstance(element, Failure):
            call.error, call.done = element.error, True
        else:
            self._workers.submit(call)
        self._pending.append(call)

    def _first_ready(self) -> _Call:
        # Failures of what is below are not known to the workers, whom threads keep: the pass, which
        # the frames of an error refer to, would live as long as they.
        for pending in self._pending:
            if isinstance(pending.element, Failure):
                return pending
        while (ended := self._workers.next_ended(_LOOK_S)) is None:
            if self._scope.closed:
                raise StopIteration
        return ended


class _Call:
    """A function's work on an element; one thread waits for it.

    Waiting costs more than most functions, so it is done by a lock alone. Each wait has a lock of
    its own, which is released once: whoever has gone meanwhile is woken for nothing.
    """

    __slots__ = ("_bell", "done", "element", "error", "value")

    def __init__(self, element: Any) -> None:
        self.element = element
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False
        self._bell: threading.Lock | None = None

    def end(self) -> None:
        """The value or the error is there."""
        self.done = True
        bell = self._bell
        if bell is not None:
            bell.release()

    def wait(self, seconds: float) -> None:
        """Wait until it is done, at most so long."""
        bell = _locked()
        self._bell = bell
        if not self.done:
            bell.acquire(timeout=seconds)


class _Workers:
    """The threads of a pass, and their processes; they know nothing of the pass itself.

    The threads are daemons, so that a function that hangs does not keep Python from ending.
    """

    def __init__(self, node: ParallelMap, calls: int) -> None:
        self._function = node.function
        self._processes = Processes(node.function, calls) if node.processes else None
        self._calls = calls
        self._work: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Those that have ended, where the first to end goes first, and the lock of who waits.
        self._ended: deque[_Call] | None = None if node.deterministic is not False else deque()
        self._bells: deque[threading.Lock] = deque()
        self._started = 0
        self._closed = False

    def submit(self, call: _Call) -> None:
        if self._started < self._calls:  # before there is something that nobody would work on
            threading.Thread(target=self._run, name="dataservice-map", daemon=True).start()
            self._started += 1
        self._work.put(call)

    def next_ended(self, seconds: float) -> _Call | None:
        """The next one that has ended, or None after so long."""
        assert self._ended is not None
        if not self._ended:
            self._bells.clear()
            bell = _locked()
            self._bells.append(bell)
            if not self._ended:
                bell.acquire(timeout=seconds)
        return self._ended.popleft() if self._ended else None

    def close(self) -> None:
        self._closed = True
        for _ in range(self._started):
            self._work.put(None)
        if self._processes is not None:
            self._processes.close()

    def _run(self) -> None:
        while (call := self._work.get()) is not None and not self._closed:
            try:
                call.value = mapped(self._processes or self._function, call.element, self._function)
            except BaseException as error:
                call.error = error
            call.end()
            if self._ended is not None:
                self._ended.append(call)
                with suppress(IndexError):  # nobody waits
                    self._bells.pop().release()
            # Who waits for work keeps nothing; and an error's traceback refers to this frame.
            del call


def _locked() -> threading.Lock:
    """For who waits: held already, since others may release it as soon as they see it."""
    lock = threading.Lock()
    lock.acquire()
    return lock
