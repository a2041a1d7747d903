"""The executor of the process, which runs calls ahead of the use of their results.

``map`` with ``num_parallel_calls``, ``prefetch`` and the read-ahead of ``interleave`` give their
calls to a :class:`ReadAhead`. All passes of a process share its threads, and so do all tasks of a
data worker. The threads form two pools:

* ``CALLS`` runs the functions of ``map``.
* ``STAGES`` runs calls that advance the pass below, as ``prefetch`` does. Such a call may
  wait for a function, for another stage or for a data service, and must not occupy a thread that
  functions need.

A pool has as many threads as its largest read-ahead asks for, however many passes there are.
Threads start when there is work for them, and end with the last pass that uses the pool.

A stage below another stage needs a thread of the same pool. So does a function that iterates a
dataset of its own. This cannot deadlock: if all threads are busy, a consumer runs the next call
itself (caller runs). Therefore a thread waits only for a running call, and a running call waits
only for calls further up its own pipeline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

from dataservice.calls import Awaited, SlowWait
from dataservice.dataset.base import (
    Context,
    ElementIterator,
    Failure,
    Node,
    Place,
    Scope,
    UnaryIterator,
    UnaryNode,
)
from dataservice.dataset.indexed import Map, mapped
from dataservice.dataset.processes import RemoteFunction
from mpidist.errors import FailedPreconditionError
from mpidist.mpi import current_frames

AUTOTUNE = -1
"""The value of ``num_parallel_calls`` or ``buffer_size`` for a number that the library chooses."""

AHEAD = 2
"""Buffer size of ``prefetch(AUTOTUNE)``: one element to consume, and one being computed."""

CYCLE_LENGTH = 16
"""Default number of datasets in ``interleave``; fixed, so that all machines have one order."""


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


# Guards all pools and lanes, and is held for a few instructions at a time. It is reentrant, because
# Python may collect garbage while it is held, and a finalizer closes a lane. No thread is started
# under it, because the new thread may run such a finalizer first. No code of users runs under it.
_LOCK = threading.RLock()
_SLOW = (
    "its next element: a function of the dataset is slow or hangs, or its source does not answer"
)
_NOT_READY = object()
_PACKAGE = __name__.partition(".")[0]
# A frame of these under one of this package waits for a lock, a peer or a helper process.
_NO_FUNCTIONS = {*sys.stdlib_module_names, "mpidist"}


# The read-ahead whose result a thread waits for, by the thread's identifier.
_awaited_lanes: dict[int, _Lane] = {}


def running_function(threads: Iterable[int]) -> str | None:
    """Return the user's function that one of some threads runs, and its line.

    Args:
        threads: Identifiers of the threads. A thread that waits for a read-ahead stands also for
            the threads that run the calls.

    Returns:
        As in ``"the function `decode` at data.py:12"``. None if no thread runs such a function, or
        only one without frames, such as a function of NumPy.
    """
    frames = current_frames()
    for thread in _with_runners(threads):
        outer, frame = frames.get(thread), None
        while outer is not None and _package_of(outer) != _PACKAGE:
            outer, frame = outer.f_back, outer
        if outer is not None and frame is not None and _package_of(frame) not in _NO_FUNCTIONS:
            code = frame.f_code
            path = code.co_filename
            if path.startswith("<"):  # cloudpickle drops the path of a script's function
                path = str(frame.f_globals.get("__file__", path))
            name = f"the function `{code.co_qualname}`"
            return f"{name} at {os.path.basename(path)}:{frame.f_lineno}"
    return None


def _with_runners(threads: Iterable[int]) -> list[int]:
    """Return some threads, and the threads that run the calls for which they wait."""
    found = list(threads)
    with _LOCK:
        for thread in found:  # it grows
            lane = _awaited_lanes.get(thread)
            found += () if lane is None else lane.runners - set(found)
    return found


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class Over:
    """The result of the last call of a read-ahead: no element follows.

    Args:
        failure: The error that ends the pass; None at its regular end.
    """

    def __init__(self, failure: Failure | None = None) -> None:
        self.failure = failure


class Call:
    """A call of a :class:`ReadAhead`.

    Attributes:
        work: The function.
        element: The argument.
        result: The result, or a Failure if the call raised.
        done: Whether the result is available.
    """

    __slots__ = ("done", "element", "result", "work")

    def __init__(self, work: Callable[[Any], Any], element: Any) -> None:
        self.work = work
        self.element = element
        self.result: Any = None
        self.done = False


class ReadAhead:
    """Calls of one pass that run ahead of their use, a limited number at a time.

    Args:
        work: Called with each element that is added. It returns :class:`Over` if nothing follows.
        limit: The largest number of calls that run at a time.
        pool: Provides the threads.
        scope: Closes the read-ahead together with the pass; None if only :meth:`close` does.
        in_order: Whether results keep the order of the elements. Otherwise the earliest call that
            is done goes first.
        threads: The number of threads that the pool needs at least; by default the limit.
    """

    def __init__(
        self,
        work: Callable[[Any], Any],
        limit: int,
        pool: Pool,
        scope: Scope | None = None,
        *,
        in_order: bool = True,
        threads: int | None = None,
    ) -> None:
        self._work = work
        self._in_order = in_order
        # The calls with results that have not been taken. The lane must not refer to them: the
        # finalizer keeps the lane alive, and a raised error refers to the frames of the pass.
        self._calls: deque[Call] = deque()
        self._lane = _Lane(limit, pool)
        # Before the lane is opened, so that an interrupt leaves no lane in the pool.
        self._finalizer = weakref.finalize(self, self._lane.close)
        pool.open(self._lane, threads or limit)
        if scope is not None:
            scope.add(self._lane)

    def __len__(self) -> int:
        return len(self._calls)

    def calls(self) -> list[Call]:
        """Return the calls with results that have not been taken."""
        with _LOCK:
            return list(self._calls)

    def add(self, element: Any) -> None:
        """Queue the call for an element. A Failure becomes the result without a call.

        Raises:
            RuntimeError: The system refuses another thread. The call stays queued.
        """
        call = Call(self._work, element)
        if isinstance(element, Failure):
            call.result, call.done = element, True
        self._calls.append(call)
        if not call.done:
            self._lane.add(call)

    def put(self, result: Any) -> None:
        """Append a result, for example from a state. An Over ends the read-ahead."""
        call = Call(self._work, None)
        call.result, call.done = result, True
        self._calls.append(call)
        if isinstance(result, Over):
            self._lane.end()

    def take(self) -> Any:
        """Return the next result. Block until the result is available.

        Raises:
            StopIteration: No call is left, the pass is over, or the scope has been closed.
            Exception: The error of the call. The error that ended the pass is raised each time.
        """
        if (result := self._ready_result()) is _NOT_READY:
            slow_wait = SlowWait("an iterator of a dataset", lambda: _SLOW, self._awaited)
            thread = get_ident()
            outer = _awaited_lanes.get(thread)  # of a wait that runs a call in this thread
            _awaited_lanes[thread] = self._lane
            try:
                while (result := self._ready_result()) is _NOT_READY:
                    self._wait(slow_wait)
            finally:
                slow_wait.close()
                if outer is None:
                    _awaited_lanes.pop(thread, None)  # a forked child has none
                else:
                    _awaited_lanes[thread] = outer
        if isinstance(result, Over):
            result = result.failure
            if result is None:
                raise StopIteration
        if not isinstance(result, Failure):
            return result
        try:
            raise result.error
        finally:
            del result  # the error's traceback refers to this frame

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait until the running calls have ended, and start no other call inside the context."""
        lane = self._lane
        with _LOCK:
            lane.pauses += 1
            lane.changed.wait_for(lambda: not lane.runners)
        try:
            yield
        finally:
            with _LOCK:
                lane.pauses -= 1
                lane.changed.notify_all()
            lane.ask()

    def close(self, wait_s: float = 0.0) -> bool:
        """Start no more calls, and drop all results. Idempotent.

        Args:
            wait_s: How long to wait for running calls, in seconds.

        Returns:
            Whether all calls have ended. False if a call closes its own pass, because the method
            does not wait for that call.
        """
        self._finalizer()
        lane = self._lane
        with _LOCK:
            calls, self._calls = self._calls, deque()
            wait_s = 0.0 if get_ident() in lane.runners else wait_s
            ended = lane.changed.wait_for(lambda: not lane.runners, wait_s)
        calls.clear()  # without the lock, because elements are users' objects
        return ended

    def _ready_result(self) -> Any:
        with _LOCK:
            if self._lane.closed or not self._calls:
                raise StopIteration
            call = self._first_done()
            if call is None and self._lane.is_lost:
                raise FailedPreconditionError(
                    "a pass that was working ahead when the process was forked cannot continue in "
                    "the child: start the pass in the child"
                )
            if call is None:
                return _NOT_READY
            if not isinstance(call.result, Over):
                self._calls.remove(call)
            return call.result

    def _wait(self, slow_wait: SlowWait) -> None:
        """Wait until a call is done. If no thread can run the next call, run it here."""
        slow_wait.check()
        lane = self._lane
        with _LOCK:
            if lane.closed or self._first_done() is not None:
                return
            if lane.runners or lane.pauses or lane.pool.has_free_thread:
                lane.awaited = self._calls[0] if self._in_order else None
                lane.changed.wait(min(slow_wait.due_s, threading.TIMEOUT_MAX))
                lane.awaited = None  # the lane must not keep the result alive
                return
        if lane.run_next():
            lane.ask()

    def _awaited(self) -> Awaited:
        with _LOCK:
            threads = list(self._lane.runners)
        return running_function(threads) or "the next element of a dataset", ()

    def _first_done(self) -> Call | None:
        for call in self._calls:
            if call.done:
                return call
            if self._in_order:
                break
        return None


class _Lane:
    """The queue of a read-ahead's calls that have not started. The pool's threads take from it.

    Attributes:
        pool: Provides the threads.
        changed: Notified when a consumer may find a result, or should run a call, and when the last
            running call has ended.
        runners: The threads that run a call now; a consumer may be among them.
        threads: The number of the pool's threads that serve this lane.
        queued: How many times the lane is in the pool's backlog.
        pauses: While positive, no call starts.
        awaited: The call that the consumer waits for; None means any call.
        closed: Whether the read-ahead has been closed.
        is_lost: Whether a call was running in the parent process at the fork of this process.
    """

    def __init__(self, limit: int, pool: Pool) -> None:
        self.pool = pool
        self.changed = threading.Condition(_LOCK)
        self.runners: set[int] = set()
        self.threads = self.queued = self.pauses = 0
        self.awaited: Call | None = None
        self.closed = self.is_lost = False
        self._limit = limit
        self._waiting: deque[Call] = deque()
        self._over = False

    def add(self, call: Call) -> None:
        with _LOCK:
            if self._over:
                return
            self._waiting.append(call)
        self.ask()
        self.pool.start_threads()

    def ask(self) -> None:
        """Add the lane to the backlog once for each call that may start."""
        with _LOCK:
            wanted = min(self._limit - len(self.runners), len(self._waiting))
            while self.queued < wanted and not self.pauses:
                self.queued += 1
                self.pool.queue(self)
            if not self.pool.has_free_thread:
                self.changed.notify_all()  # the consumer runs the call

    def run_next(self) -> bool:
        """Run a call in this thread. Return False if no call may start."""
        with _LOCK:
            if self.pauses or not self._waiting or len(self.runners) >= self._limit:
                return False
            self.runners.add(get_ident())
            call = self._waiting.popleft()
        try:
            call.result = call.work(call.element)
        except BaseException as error:
            call.result = Failure(error)
        if isinstance(call.result, Over):
            self.end()
        with _LOCK:
            call.done = True
            self.runners.discard(get_ident())
            if not self.runners or self.awaited is None or self.awaited is call:
                self.changed.notify_all()
        del call  # the traceback of its error refers to this frame
        return True

    def end(self) -> None:
        """Drop the calls that have not started, and leave the pool."""
        with _LOCK:
            self._over = True
            waiting, self._waiting = self._waiting, deque()
            self.pool.leave(self)
        waiting.clear()  # without the lock, because elements are users' objects

    def close(self) -> None:
        self.closed = True
        self.end()
        with _LOCK:
            self.changed.notify_all()

    def forget_threads(self) -> None:
        """Reset the lane in a forked child, where only the thread that forked exists."""
        self.changed = threading.Condition(_LOCK)
        self.is_lost = bool(self.runners)
        self.runners.clear()
        self.threads = self.queued = 0


class Pool:
    """Threads that run the calls of many passes.

    The threads are daemons, so that a hanging function does not keep the process alive. A hanging
    call occupies a thread of the pool only while its pass is open.

    Args:
        name: The name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lanes: set[_Lane] = set()
        # A lane is here once for each call that needs a thread, so that lanes take turns.
        self._backlog: deque[_Lane] = deque()
        self._changed = threading.Condition(_LOCK)
        self._size = self._threads = self._idle = 0

    @property
    def has_free_thread(self) -> bool:
        """True if idle threads, or threads about to start, take all lanes of the backlog."""
        return self._idle >= len(self._backlog)

    def open(self, lane: _Lane, threads: int) -> None:
        """Add a lane. Allow at least ``threads`` threads until the last lane has left."""
        with _LOCK:
            self._lanes.add(lane)
            self._size = max(self._size, threads)

    def leave(self, lane: _Lane) -> None:
        """Remove a lane, and replace its threads, because their calls may hang. Idempotent."""
        if lane not in self._lanes:
            return
        self._lanes.discard(lane)
        self._threads -= lane.threads
        lane.threads = 0
        if not self._lanes:
            self._size = 0
            self._changed.notify_all()

    def queue(self, lane: _Lane) -> None:
        """Append a lane to the backlog."""
        self._backlog.append(lane)
        self._changed.notify()

    def start_threads(self) -> None:
        """Start the missing threads. Called without the lock.

        Raises:
            RuntimeError: The system refuses another thread. Consumers then run the calls.
        """
        while True:
            with _LOCK:
                if self.has_free_thread or self._threads >= self._size:
                    return
                self._threads += 1
                self._idle += 1
            begun: list[bool] = []
            try:
                thread = threading.Thread(
                    target=self._serve, args=(begun,), name=self._name, daemon=True
                )
                thread.start()
            except BaseException:
                with _LOCK:
                    if not begun:  # at an interrupt the thread may already run
                        begun.append(False)
                        self._threads -= 1
                        self._idle -= 1
                    for lane in self._backlog:
                        lane.changed.notify_all()
                raise

    def forget_threads(self) -> None:
        """Reset the pool in a forked child, where only the thread that forked exists."""
        self._changed = threading.Condition(_LOCK)
        self._threads = self._idle = 0
        self._backlog.clear()
        for lane in self._lanes:
            lane.forget_threads()

    def _serve(self, begun: list[bool]) -> None:
        with _LOCK:
            if begun:  # start_threads() has been interrupted, and does not count this thread
                return
            begun.append(True)
        while (lane := self._next_lane()) is not None:
            while lane.run_next() and not self._backlog:
                pass
            lane.ask()
            with _LOCK:
                if not lane.threads:  # replaced
                    return
                lane.threads -= 1
                self._idle += 1

    def _next_lane(self) -> _Lane | None:
        with _LOCK:
            self._changed.wait_for(lambda: self._backlog or not self._lanes)
            self._idle -= 1
            if not self._backlog:
                self._threads -= 1
                return None
            lane = self._backlog.popleft()
            lane.queued -= 1
            lane.threads += 1
            return lane


CALLS = Pool("dataservice-map")
STAGES = Pool("dataservice-prefetch")


def _forget_threads() -> None:
    _LOCK._at_fork_reinit()  # type: ignore[attr-defined]  # another thread may have held it
    _awaited_lanes.clear()
    for pool in (CALLS, STAGES):
        pool.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)


logger = logging.getLogger(__name__)

# How long close() waits for a user's function to return.
_CLOSE_S = 5.0
# The number of threads that all prefetching passes of the process share. If all are busy, a
# consumer computes its elements itself, as without a prefetch.
_THREADS = 8
# The largest number of elements that a prefetch holds, for any buffer_size.
_LARGEST_BUFFER = 1 << 16


@dataclass(frozen=True)
class Prefetch(UnaryNode):
    """Computes elements ahead of their use.

    Attributes:
        parent: The node below.
        buffer_size: The number of elements to compute ahead.
        threads: The number of threads that the pool needs at least, for all such passes.
    """

    parent: Node
    buffer_size: int
    threads: int = field(default=_THREADS, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.buffer_size < 1:
            raise ValueError(f"prefetch needs a buffer_size of at least 1, not {self.buffer_size}")
        self.check_not_on_device("prefetch")

    def indexed_length(self) -> int | None:
        return self.parent.indexed_length()

    def sample(self) -> Node:
        return self.parent.sample()

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return self._begin(partial(self.parent.read, places), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return self._begin(self.parent.iterate, context)

    def _begin(
        self, begin: Callable[[Context], ElementIterator], context: Context
    ) -> ElementIterator:
        return PrefetchIterator(begin, context, self.buffer_size, STAGES, self.threads)


class PrefetchIterator(ElementIterator):
    """One pass. One call at a time advances the pass below.

    Args:
        begin: Starts the pass below in a context.
        context: The context of this pass.
        size: The number of elements to compute ahead.
        pool: Provides the thread.
        threads: The number of threads that the pool needs at least.
    """

    def __init__(
        self,
        begin: Callable[[Context], ElementIterator],
        context: Context,
        size: int,
        pool: Pool,
        threads: int,
    ) -> None:
        self._size = size
        # A scope of its own, so that closing it ends the waits of the pass below, and no others.
        scope = Scope()
        if context.scope is not None:
            context.scope.add(scope)
        self._parent = begin(dataclasses.replace(context, scope=scope))
        self._ahead = ReadAhead(_Advance(self._parent), 1, pool, scope, threads=threads)
        self._finalizer = weakref.finalize(self, scope.close)

    def __next__(self) -> Any:
        self._fill()
        try:
            return self._ahead.take()
        finally:
            # Also if an error is raised: a raised error refers to the frames of this pass, and the
            # next call makes _Advance forget the error. If no thread can be started, the consumer
            # makes that call later.
            with contextlib.suppress(RuntimeError):
                self._fill()

    def get_state(self) -> tuple[list[Any], bool, Failure | None, Any]:
        # The elements that were computed ahead are a part of the state.
        with self._ahead.paused():
            made = [call.result for call in self._ahead.calls() if call.done]
            over = made.pop() if made and isinstance(made[-1], Over) else None
            failure = over.failure if over is not None else None
            return made, over is not None, failure, self._parent.get_state()

    def set_state(self, state: tuple[list[Any], bool, Failure | None, Any]) -> None:
        elements, ended, failure, below = state
        self._parent.set_state(below)
        for element in elements:
            self._ahead.put(element)
        if ended:
            self._ahead.put(Over(failure))

    def close(self) -> None:
        self._finalizer()
        if self._ahead.close(_CLOSE_S):
            self._parent.close()
        else:
            logger.warning("prefetch: a function is still running %g s after close()", _CLOSE_S)

    def goes_on(self, error: Exception) -> bool:
        ends = (call.result for call in self._ahead.calls() if isinstance(call.result, Over))
        return not any(over.failure and over.failure.error is error for over in ends)

    def _fill(self) -> None:
        while len(self._ahead) < min(self._size, _LARGEST_BUFFER):
            self._ahead.add(None)


class _Advance:
    """Computes the next element of a pass.

    The second of two equal errors in a row ends the pass, unless the pass can go on after it.
    """

    def __init__(self, elements: ElementIterator) -> None:
        self._elements = elements
        self._last: Exception | None = None

    def __call__(self, _: None) -> Any:
        try:
            element = next(self._elements)
        except StopIteration:
            over = Over()
        except BaseException as error:
            again = error is self._last and not self._elements.goes_on(error)
            if isinstance(error, Exception) and not again:
                self._last = error
                return Failure(error)
            over = Over(Failure(error))
        else:
            self._last = None
            return element
        self._elements.close()
        return over


# Elements in work for each parallel call: the current one, and one that waits or is finished.
_AHEAD = 2


@dataclass(frozen=True)
class ParallelMap(Map):
    """A map that runs several calls of the function at once.

    Attributes:
        parent: The node below.
        function: The function.
        calls: The number of calls at a time; AUTOTUNE stands for the number of cores at the pass.
        deterministic: Whether elements keep their order. Otherwise finished elements go first.
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
        # A parallel pass reads 2 * calls elements before it returns the first.
        return Map(self.parent.sample(), self.function)

    def _read(self, places: Iterator[Place], context: Context) -> ElementIterator:
        return ParallelMapIterator(self, self.parent.read(places, context), context)

    def _iterate(self, context: Context) -> ElementIterator:
        return ParallelMapIterator(self, self.parent.iterate(context), context)


class ParallelMapIterator(UnaryIterator):
    """One pass. It holds the elements that are being computed, and the finished ones."""

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
        # The state holds no results: after set_state() these calls are made again.
        elements = [call.element for call in self._ahead.calls()]
        return elements, self._ended, super().get_state()

    def set_state(self, state: tuple[list[Any], bool, Any]) -> None:
        elements, self._ended, below = state
        super().set_state(below)
        for element in elements:
            self._ahead.add(element)

    def close(self) -> None:
        # Functions that run in threads are not awaited.
        self._ended = True
        self._ahead.close()
        if self._remote is not None:
            self._remote.close()
        super().close()
