"""The executor of the process: calls that passes make ahead of their use.

``map`` with ``num_parallel_calls``, ``prefetch`` and the read-ahead of ``interleave`` give their
calls to a :class:`ReadAhead`. All passes of a process share its threads, and so do all tasks of a
data worker. The threads form two pools:

* ``CALLS`` runs the functions of ``map``.
* ``STAGES`` runs calls that advance the pass below, as those of ``prefetch`` do. Such a call may
  wait for a function, for another stage or for a data service, and must not occupy a thread that
  functions need.

A pool has as many threads as its largest read-ahead asks for, however many passes there are.
Threads start when there is work for them, and end with the last pass that uses the pool.

A stage below another stage waits in a pool for a thread of the same pool, and so does a function
that iterates a dataset of its own. This cannot deadlock, for the caller runs a call that has no
thread: a consumer that finds all threads busy makes the next call itself. Therefore a thread waits
only for a call that is running, and that one waits only for calls further up its own pipeline.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import get_ident
from typing import Any

from dataservice.dataset.context import Scope
from dataservice.dataset.failure import Failure

# Guards all pools and lanes, for a few instructions at a time. It is reentrant, because Python may
# collect garbage inside of any of them, and a finalizer closes a lane. Under it no thread is
# started, since the new thread may run such a finalizer first, and no code of users is called.
_LOCK = threading.RLock()
_NOT_READY = object()


class Over:
    """The result of the last call of a read-ahead: no element follows.

    Args:
        failure: The error that ends the pass; None at its regular end.
    """

    def __init__(self, failure: Failure | None = None) -> None:
        self.failure = failure


class _Call:
    """A call that is made ahead; its result is a Failure if the call raises."""

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
        limit: How many calls may run at a time.
        pool: Provides the threads.
        scope: Closes the read-ahead, whichever thread waits in it; None if nothing else does.
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
        # The calls whose results have not been taken. They are not reachable from the lane, which
        # the finalizer keeps alive: an error that has been raised refers to the frames of the pass.
        self._calls: deque[_Call] = deque()
        self._lane = _Lane(limit, pool)
        pool.open(self._lane, threads or limit)
        self._finalizer = weakref.finalize(self, self._lane.close)
        if scope is not None:
            scope.add(self._lane)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, element: Any) -> None:
        """Queue the call for an element; a Failure in the place of one is the result itself.

        Raises:
            RuntimeError: The system refuses another thread.
        """
        if isinstance(element, Failure):
            self._append(element, element)
            return
        call = _Call(self._work, element)
        self._calls.append(call)
        self._lane.add(call)

    def put(self, result: Any) -> None:
        """Append a result, as from a state; an Over ends the read-ahead."""
        self._append(None, result)
        if isinstance(result, Over):
            self._lane.end()

    def take(self) -> Any:
        """Return the next result, and wait for it if need be.

        Raises:
            StopIteration: There is none, the pass is over, or the scope has been closed.
            Exception: The error of the call, or the one that ended the pass, each time.
        """
        while (result := self._ready_result()) is _NOT_READY:
            self._wait()
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

    def elements(self) -> list[Any]:
        """Return the elements whose results have not been taken."""
        with _LOCK:
            return [call.element for call in self._calls]

    def results(self) -> list[Any]:
        """Return the results in their order, up to the first call that is not done."""
        with _LOCK:
            calls = list(self._calls)
        results = []
        for call in calls:
            if not call.done:
                break
            results.append(call.result)
        return results

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the running calls end, and begin no other inside of the context."""
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
        """Begin no call any more, and drop all results; idempotent.

        Args:
            wait_s: How long to wait for running calls, in seconds.

        Returns:
            Whether all calls have ended. A call that closes its own pass has not, and is not waited
            for.
        """
        self._finalizer()
        lane = self._lane
        with _LOCK:
            calls, self._calls = self._calls, deque()
            wait_s = 0.0 if get_ident() in lane.runners else wait_s
            ended = lane.changed.wait_for(lambda: not lane.runners, wait_s)
        calls.clear()  # without the lock, for elements are users' objects
        return ended

    def _append(self, element: Any, result: Any) -> None:
        call = _Call(self._work, element)
        call.result, call.done = result, True
        self._calls.append(call)

    def _ready_result(self) -> Any:
        with _LOCK:
            if self._lane.closed or not self._calls:
                raise StopIteration
            call = self._first_done()
            if call is None:
                return _NOT_READY
            if not isinstance(call.result, Over):
                self._calls.remove(call)
            return call.result

    def _wait(self) -> None:
        """Wait until a call is done, or run one here if no thread is going to."""
        lane = self._lane
        with _LOCK:
            if lane.closed or self._first_done() is not None:
                return
            if lane.runners or lane.coming or lane.pauses:
                lane.awaited = self._calls[0] if self._in_order else None
                lane.changed.wait()
                lane.awaited = None  # the finalizer keeps the lane alive, but not the result
                return
        if lane.run_next():
            lane.ask()

    def _first_done(self) -> _Call | None:
        for call in self._calls:
            if call.done:
                return call
            if self._in_order:
                break
        return None


class _Lane:
    """The calls of a read-ahead that have not been done, as threads see them.

    Attributes:
        pool: Provides the threads.
        changed: Notified when a call is done that a consumer waits for, when the last running one
            is, and when the lane is closed.
        runners: The threads that run a call now; the consumer may be among them.
        threads: The number of the pool's threads that the lane has.
        coming: How many of these have not begun a call.
        pauses: While positive, no call begins.
        awaited: The call that the consumer waits for; None stands for any.
        queued: Whether the lane waits for a thread of the pool.
        closed: Whether the results are not wanted any more.
    """

    def __init__(self, limit: int, pool: Pool) -> None:
        self.pool = pool
        self.changed = threading.Condition(_LOCK)
        self.runners: set[int] = set()
        self.threads = self.coming = self.pauses = 0
        self.awaited: _Call | None = None
        self.queued = self.closed = False
        self._limit = limit
        self._waiting: deque[_Call] = deque()
        self._over = False

    @property
    def wants_thread(self) -> bool:
        wanted = min(self._limit - len(self.runners), len(self._waiting))
        return self.coming < wanted and not self.pauses

    def add(self, call: _Call) -> None:
        with _LOCK:
            if self._over:
                return
            self._waiting.append(call)
        self.ask()

    def ask(self) -> None:
        """Get threads for the calls that may begin."""
        with _LOCK:
            self.pool.ask(self)
        self.pool.start_threads()

    def run_next(self, *, arrives: bool = False) -> bool:
        """Run a call in this thread; return False if none may begin.

        Args:
            arrives: Whether the thread is one of those that come from the pool.
        """
        with _LOCK:
            self.coming -= arrives
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
        del call  # its error refers to this frame, which has called the frames of the traceback
        return True

    def serve(self) -> None:
        """Run calls in a thread of the pool, until none may begin or other lanes wait for it."""
        ran = self.run_next(arrives=True)
        while ran and not self.pool.yields(self):
            ran = self.run_next()

    def end(self) -> None:
        """Give up the calls that have not begun, and leave the pool."""
        with _LOCK:
            self._over = True
            waiting, self._waiting = self._waiting, deque()
            self.pool.leave(self)
        waiting.clear()  # without the lock, for elements are users' objects

    def close(self) -> None:
        self.closed = True
        self.end()
        with _LOCK:
            self.changed.notify_all()


class Pool:
    """Threads that run the calls of many passes.

    The threads are daemons, so that a function that hangs does not keep Python from ending. A call
    that hangs occupies a thread of the pool only as long as its pass is open.

    Args:
        name: The name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._lanes: set[_Lane] = set()
        self._backlog: deque[_Lane] = deque()
        # For each lane in the queue there is a thread that comes for it; None ends a thread.
        self._given: SimpleQueue[_Lane | None] = SimpleQueue()
        self._busy = self._idle = self._missing = 0

    def open(self, lane: _Lane, threads: int) -> None:
        """Have at least so many threads until the last lane has left."""
        with _LOCK:
            self._lanes.add(lane)
            self._size = max(self._size, threads)

    def leave(self, lane: _Lane) -> None:
        """Let threads that are stuck in a call of the lane not count any more; idempotent."""
        if lane not in self._lanes:
            return
        self._lanes.discard(lane)
        self._busy -= lane.threads
        lane.threads = 0
        if not self._lanes:
            self._size = 0
            while self._idle:
                self._idle -= 1
                self._given.put(None)

    def ask(self, lane: _Lane) -> None:
        """Give the lane threads, or a place in the backlog if all are busy."""
        while lane.wants_thread:
            if self._busy >= self._size:
                self._queue(lane)
                return
            self._assign(lane)
            self._given.put(lane)
            if self._idle:
                self._idle -= 1
            else:
                self._missing += 1

    def yields(self, lane: _Lane) -> bool:
        """Return whether a thread leaves the lane, since others wait; the lane goes behind them."""
        if not self._backlog:
            return False
        with _LOCK:
            if lane.wants_thread:
                self._queue(lane)
        return True

    def start_threads(self) -> None:
        """Start the threads that :meth:`ask` has found missing; without the lock.

        Raises:
            RuntimeError: The system refuses one. Consumers make the calls themselves then.
        """
        while self._missing:
            with _LOCK:
                if not self._missing:
                    return
                self._missing -= 1
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                with _LOCK:
                    lane = self._given.get_nowait()
                    if lane is not None:
                        lane.coming -= 1
                        self._release(lane)
                        lane.changed.notify_all()  # its consumer may wait for this thread
                raise

    def _serve(self) -> None:
        while (lane := self._given.get()) is not None:
            while lane is not None:
                lane.serve()
                with _LOCK:
                    self._release(lane)
                    lane = self._next_lane()
                    if lane is None:
                        if not self._lanes:
                            return
                        self._idle += 1

    def _next_lane(self) -> _Lane | None:
        while self._backlog and self._busy < self._size:
            lane = self._backlog.popleft()
            lane.queued = False
            if lane.wants_thread:
                self._assign(lane)
                if lane.wants_thread:
                    self._queue(lane)
                return lane
        return None

    def _assign(self, lane: _Lane) -> None:
        self._busy += 1
        lane.threads += 1
        lane.coming += 1

    def _release(self, lane: _Lane) -> None:
        if lane.threads:  # it has not left
            lane.threads -= 1
            self._busy -= 1

    def _queue(self, lane: _Lane) -> None:
        if not lane.queued:
            lane.queued = True
            self._backlog.append(lane)


CALLS = Pool("dataservice-map")
STAGES = Pool("dataservice-prefetch")
