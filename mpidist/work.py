"""The one handle of everything asynchronous."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from mpidist.errors import DeadlineExceededError
from mpidist.runtime import Backoff, fork

logger = logging.getLogger(__name__)

Timeout = float | timedelta | None

_SLICE_S = 2e-4  # for which the thread of futures waits for one work of several
_SEEN = "_mpidist_seen"  # an attribute of errors


def seconds(timeout: Timeout) -> float | None:
    """Local. A time limit in seconds.

    Args:
        timeout: Seconds, a timedelta, or None for no limit.

    Returns:
        Seconds, or None.

    Raises:
        TypeError: It is none of these.
        ValueError: The limit is negative, or no number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, str | bytes) or not hasattr(timeout, "__float__"):
        if not isinstance(timeout, timedelta):
            raise TypeError(f"a time limit is a number of seconds or a timedelta, not {timeout!r}")
        value = timeout.total_seconds()
    else:
        value = float(timeout)
    if not value >= 0:
        raise ValueError(f"a time limit cannot be negative, nor NaN: {timeout!r}")
    return value


class Work:
    """A handle of an operation that goes on; any number of threads may wait for it.

    Args:
        name: What it is, for messages: ``"all_reduce"``, ``"ps/Push to ps 0"``.
        drive: Called as ``drive(work, deadline)`` by a waiting thread; makes the operation
            progress and returns when the work is complete or ``time.monotonic()`` passes
            ``deadline``. Without it, another thread completes the work.
    """

    # What most works never set: to have it here makes them cheaper.
    _event: threading.Event | None = None
    _future: WorkFuture | None = None
    _callbacks: tuple[Callable[[Work], None], ...] = ()
    _done = False
    _value: Any = None
    _error: BaseException | None = None
    limit: float | None = None
    """Seconds after which ``wait()`` gives up if it is not told another number; None for never."""

    def __init__(self, name: str, drive: Callable[[Work, float], None] | None = None) -> None:
        self._name = name
        self._drive = drive
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return self._name

    def is_completed(self) -> bool:
        """Local. True once the operation has ended, well or badly; never blocks."""
        return self._done

    def is_success(self) -> bool:
        """Local. True once the operation has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error with which the operation ended; None if it goes on or went well."""
        if self._error is not None:
            self._error.__dict__[_SEEN] = True
        return self._error

    @property
    def error(self) -> BaseException | None:
        """The error, as of :meth:`exception`, which then still counts as not seen."""
        return self._error

    @property
    def is_seen(self) -> bool:
        """Whether the error was raised somewhere, or read from this Work or one made of it.

        Pushes to parameter servers raise an error that nobody has seen at a later operation.
        """
        error = self._error
        return error is not None and (error.__traceback__ is not None or _SEEN in error.__dict__)

    def wait(self, timeout: Timeout = None) -> bool:
        """Local. Block until the operation has ended.

        Args:
            timeout: Seconds or a timedelta; by default the time limit of the group, or of the
                call, if it has one. It counts from here.

        Returns:
            True.

        Raises:
            DeadlineExceededError: It has not ended in time. It goes on; wait may be called again.
            Exception: What the operation failed with.
        """
        if not self._done:
            limit = seconds(timeout)
            limit = self.limit if limit is None else limit
            self.block(float("inf") if limit is None else time.monotonic() + limit)
            if not self._done:
                raise DeadlineExceededError(
                    f"{self.name} has not completed within {limit:g} s; it goes on, "
                    "and wait() may be called again"
                )
        if self._error is not None:
            raise self._error
        return True

    def result(self, timeout: Timeout = None) -> Any:
        """Wait, and return the result of the operation; raises as :meth:`wait`.

        Returns:
            For a collective, a list of the arrays that receive, as torch returns them: empty on
            ranks where none does. For ``irecv``, the world rank of the sender.
        """
        self.wait(timeout)
        return self._value

    def get_future(self) -> WorkFuture:
        """Return a future that ends as this work does, with its result."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = WorkFuture()
            future.set_running_or_notify_cancel()  # a work cannot be cancelled, so nor can this
            self._future = future
        self.add_done_callback(_settle)
        if self._drive is not None and not self._done:
            _driver.add(self)
        return future

    def __await__(self) -> Generator[Any, None, Any]:
        """In a coroutine, ``await work`` lets others run until it has ended; gives its result."""
        import asyncio

        return asyncio.wrap_future(self.get_future()).__await__()

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Local. Call ``callback(work)`` once the work has ended, at once if it has already.

        It runs on the thread that completes the work, and must not wait; what it raises is logged.
        """
        with self._lock:
            if not self._done:
                self._callbacks += (callback,)
                return
        self._call(callback)

    def _call(self, callback: Callable[[Work], None]) -> None:
        try:
            callback(self)
        except Exception:  # whoever waits for the work has nothing to do with it
            logger.exception("a callback of %r failed", self)

    def complete(self, value: Any = None, error: BaseException | None = None) -> None:
        """Local. End the work; for those who carry the operation out. A second call is ignored."""
        with self._lock:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            self._drive = None  # which may know this work: nothing else would break the circle
            event, callbacks = self._event, self._callbacks
            if callbacks:
                self._callbacks = ()  # they may hold much
        if event is not None:
            event.set()
        interrupt: BaseException | None = None
        for callback in callbacks:
            try:
                self._call(callback)
            except BaseException as error:  # the other callbacks must run, too
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt

    def then(self, transform: Callable[[Any], Any]) -> Work:
        """Local. A Work that ends with this one; its result is ``transform`` of this one's.

        Args:
            transform: Runs on the thread that completes this work, and must not wait. What it
                raises becomes the error of the new work.
        """

        def ended(work: Work) -> None:
            if work._error is not None:
                following.complete(error=work._error)
                return
            try:
                following.complete(transform(work._value))
            except BaseException as error:  # of a signal's handler, too
                following.complete(error=error)
                if not isinstance(error, Exception):
                    raise

        def drive(following: Work, deadline: float) -> None:
            self.block(deadline)
            if self._done:  # perhaps on another thread, which is about to end the new work too
                following.wait_for_event(deadline)

        following = _Following(self.name, drive, [self])
        following.limit = self.limit
        self.add_done_callback(ended)
        return following

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the watchdog, in the block, that a thread waits for the operation."""
        yield

    def block(self, deadline: float) -> None:
        """Local. Let the operation progress until it has ended or the deadline passes.

        Args:
            deadline: On the clock of ``time.monotonic()``.
        """
        drive = self._drive
        if drive is not None:
            drive(self, deadline)
        else:
            self.wait_for_event(deadline)

    def wait_for_event(self, deadline: float) -> None:
        """Local. Block until another thread completes the work, or the deadline passes.

        Args:
            deadline: On the clock of ``time.monotonic()``.
        """
        with self._lock:
            if self._done:
                return
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        remaining = deadline - time.monotonic()
        event.wait(None if remaining == float("inf") else max(remaining, 0.0))

    def __repr__(self) -> str:
        if not self._done:
            state = "going on"
        else:
            state = "done" if self._error is None else f"failed: {self._error!r}"
        return f"<Work {self.name}: {state}>"


class WorkFuture(Future[Any]):
    """A ``concurrent.futures.Future`` that also has the methods of ``torch.futures.Future``."""

    def wait(self) -> Any:
        """Block until the future has ended; return its value, or raise its error."""
        return self.result()

    def value(self) -> Any:
        """Return the value of a future that has ended, or raise its error.

        Raises:
            RuntimeError: The future has not ended.
        """
        if not self.done():
            raise RuntimeError("the future has no value yet: wait() for it")
        return self.result()

    def then(self, callback: Callable[[WorkFuture], Any]) -> WorkFuture:
        """Return a future that ends with what a function of this one returns, or raises.

        Args:
            callback: It gets this future, once that has ended, and runs on the thread that ends it;
                at once, on this thread, if it has ended already. It must not wait for others.
        """
        following = WorkFuture()
        following.set_running_or_notify_cancel()

        def ended(_: Future[Any]) -> None:
            try:
                value = callback(self)
            except BaseException as error:
                following.set_exception(error)
                if not isinstance(error, Exception):  # of a signal's handler
                    raise
            else:
                following.set_result(value)

        self.add_done_callback(ended)
        return following


class _Following(Work):
    """A Work that ends with others; to look at it is to look at them."""

    def __init__(
        self, name: str, drive: Callable[[Work, float], None], parts: Sequence[Work]
    ) -> None:
        super().__init__(name, drive)
        self._parts = parts

    def is_completed(self) -> bool:
        if not self._done:
            for part in self._parts:
                part.is_completed()
        return self._done

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.waiting())
            yield


def completed(name: str, value: Any = None) -> Work:
    """Local. A work that has ended well already."""
    work = Work(name)
    work.complete(value)
    return work


def gather_works(name: str, works: list[Work]) -> Work:
    """Local. One handle for several: it ends when all have ended, with the list of their values.

    Args:
        name: What the whole is, for messages.
        works: The parts; the first error among them, in order, becomes the error of the whole.
    """

    def drive(whole: Work, deadline: float) -> None:
        for part in works:
            if not part.is_completed():
                part.block(deadline)
        if all(part.is_completed() for part in works):
            whole.wait_for_event(deadline)  # another thread is about to end it

    ended = itertools.count(1)

    def part_ended(_: Work) -> None:
        # To ask the others would end them here, one within the other.
        if next(ended) == len(works):
            error = next((p.error for p in works if p.error is not None), None)
            whole.complete([part._value for part in works], error)

    whole = _Following(name, drive, works)
    limits = [part.limit for part in works if part.limit is not None]
    whole.limit = max(limits) if len(limits) == len(works) > 0 else None
    if not works:
        whole.complete([])
    for part in works:
        part.add_done_callback(part_ended)
    return whole


def _settle(work: Work) -> None:
    future = work.get_future()
    if work._error is not None:
        work._error.__dict__[_SEEN] = True
        future.set_exception(work._error)
    else:
        future.set_result(work._value)


class _Driver:
    """The thread that drives the pending works of futures. It ends when no work is pending."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the works and the thread, which a forked child does not have."""
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._running = False

    def add(self, work: Work) -> None:
        """Drive a work until it has ended."""
        with self._lock:
            self._works.append(work)
            if not self._running:
                threading.Thread(target=self._run, name="mpidist-futures", daemon=True).start()
                self._running = True

    def _run(self) -> None:
        backoff, waits = Backoff(), dict[int, ExitStack]()
        for turn in itertools.count():
            with self._lock:
                ended = [work for work in self._works if work._done]
                self._works = [work for work in self._works if not work._done]
                pending = list(self._works)
                self._running = bool(pending)
            for work in ended:
                waits.pop(id(work), ExitStack()).close()
            if not pending or fork.mpi_has_ended():
                return
            if ended:
                backoff.reset()
            for work in pending:
                if id(work) not in waits:
                    waits[id(work)] = ExitStack()
                    waits[id(work)].enter_context(work.waiting())
                _drive_once(work, 0.0)
            # Other works make progress only while a thread waits for one of them.
            _drive_once(pending[turn % len(pending)], _SLICE_S)
            backoff.pause()


def _drive_once(work: Work, seconds: float) -> None:
    """Let a work make progress. Log what its callbacks raise, because the thread must go on."""
    try:
        if not work.is_completed() and seconds:  # this tests the requests of MPI
            work.block(time.monotonic() + seconds)
    except BaseException:
        logger.exception("a callback of %r failed", work)


_driver = _Driver()
os.register_at_fork(after_in_child=_driver.reset)
