"""The handle of asynchronous operations."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

from mpidist.errors import DeadlineExceededError
from mpidist.mpi import Backoff, fork

logger = logging.getLogger(__name__)

Timeout = float | timedelta | None

_SLICE_S = 2e-4  # wait of the futures' thread for one of several works
_SEEN = "_mpidist_seen"  # an attribute of errors


def seconds(timeout: Timeout) -> float | None:
    """Return a time limit in seconds.

    Args:
        timeout: Seconds, a timedelta, or None for no limit.

    Returns:
        Seconds, or None.

    Raises:
        TypeError: The limit has another type.
        ValueError: The limit is negative or NaN.
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
    """The handle of an asynchronous operation. Any number of threads may wait for it.

    Args:
        name: The operation, for messages: ``"all_reduce"``, ``"ps/Push to ps 0"``.
        drive: Called as ``drive(work, deadline)`` by a waiting thread. It makes the operation
            progress, and returns when the work has ended or ``time.monotonic()`` passes
            ``deadline``. Without it, another thread completes the work.
    """

    # Class attributes for values that most works never set make a Work cheaper.
    _event: threading.Event | None = None
    _future: WorkFuture | None = None
    _callbacks: tuple[Callable[[Work], None], ...] = ()
    _done = False
    _value: Any = None
    _error: BaseException | None = None
    limit: float | None = None
    """Default timeout of ``wait()`` in seconds; None for no limit."""

    def __init__(self, name: str, drive: Callable[[Work, float], None] | None = None) -> None:
        self._name = name
        self._drive = drive
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The operation, for messages."""
        return self._name

    def is_completed(self) -> bool:
        """Test the operation. Return whether it has ended, with success or an error.

        The test may run callbacks of the operation. It does not wait for other ranks, except for
        up to 3 s after a comparison has found that the ranks call different collectives.
        """
        return self._done

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error; never blocks."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if it is pending or has succeeded."""
        if self._error is not None:
            self._error.__dict__[_SEEN] = True
        return self._error

    @property
    def error(self) -> BaseException | None:
        """The error, or None. Unlike :meth:`exception`, reading it does not mark it as seen."""
        return self._error

    @property
    def is_seen(self) -> bool:
        """True if the error was raised, or read from this Work or a Work made from it.

        An error of a push that the caller has not seen is raised by a later operation.
        """
        error = self._error
        return error is not None and (error.__traceback__ is not None or _SEEN in error.__dict__)

    def wait(self, timeout: Timeout = None) -> bool:
        """Block until the operation has ended.

        Args:
            timeout: Seconds or a timedelta from now; by default the time limit of the group or of
                the call, if it has one.

        Returns:
            True.

        Raises:
            DeadlineExceededError: The operation has not ended in time. It stays pending, and wait
                may be called again.
            Exception: The error of the operation.
        """
        if not self._done:
            limit = seconds(timeout)
            limit = self.limit if limit is None else limit
            self.block(float("inf") if limit is None else time.monotonic() + limit)
            if not self._done:
                raise self.past_limit(limit)
        if self._error is not None:
            raise self._error
        return True

    def past_limit(self, limit: float | None) -> DeadlineExceededError:
        """Return the error of an operation that has not ended within a limit, in seconds."""
        return DeadlineExceededError(
            f"{self.name} has not completed within {limit:g} s; after the timeout it stays "
            "pending, and wait() may be called again"
        )

    def result(self, timeout: Timeout = None) -> Any:
        """Wait, and return the result of the operation; raises as :meth:`wait`.

        Returns:
            For a collective, a list of its output arrays, as in torch. For ``reduce`` that is the
            array on every rank; for ``gather`` the list is empty on ranks other than the
            destination. For ``irecv``, the world rank of the sender.
        """
        self.wait(timeout)
        return self._value

    def get_future(self) -> WorkFuture:
        """Return a future with the result or the error of this work.

        If the work has a time limit, the future gets a DeadlineExceededError when the limit has
        passed, counted from the first call.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            future = WorkFuture()
            future.set_running_or_notify_cancel()  # a work cannot be cancelled
            self._future = future
        self.add_done_callback(_settle)
        if self._drive is not None and not self._done:
            _driver.add(self)
        return future

    def __await__(self) -> Generator[Any, None, Any]:
        """Let other coroutines run until the work has ended, and return its result."""
        import asyncio

        return asyncio.wrap_future(self.get_future()).__await__()

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call ``callback(work)`` once the work has ended, or at once if it has ended already.

        The callback runs on the thread that completes the work, and must not block. Its exceptions
        are logged.
        """
        with self._lock:
            if not self._done:
                self._callbacks += (callback,)
                return
        self._call(callback)

    def _call(self, callback: Callable[[Work], None]) -> None:
        try:
            callback(self)
        except Exception:  # the callers that wait for the work are not affected
            logger.exception("a callback of %r failed", self)

    def complete(self, value: Any = None, error: BaseException | None = None) -> None:
        """End the work; called by the code that runs the operation. Later calls are ignored."""
        with self._lock:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            self._drive = None  # breaks a reference cycle, if it refers to this work
            event, callbacks = self._event, self._callbacks
            if callbacks:
                self._callbacks = ()  # they may keep much memory
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
        """Return a Work with the result ``transform(result)`` of this one.

        Args:
            transform: Runs on the thread that completes this work, and must not block. Its
                exception becomes the error of the new work.
        """
        return _Following("", [self], lambda: transform(self._value))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell the watchdog, in the block, that a thread waits for the operation."""
        yield

    def block(self, deadline: float) -> None:
        """Make the operation progress until it has ended or the deadline passes.

        Args:
            deadline: A time of ``time.monotonic()``.
        """
        drive = self._drive
        if drive is not None:
            drive(self, deadline)
        else:
            self.wait_for_event(deadline)

    def wait_for_event(self, deadline: float) -> None:
        """Block until another thread completes the work, or the deadline passes.

        Args:
            deadline: A time of ``time.monotonic()``.
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
            state = "pending"
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
        """Return a future with the result or the exception of a function of this future.

        Args:
            callback: Called with this future when it has ended, on the thread that ends it, or at
                once on this thread if it has ended already. It must not block.
        """
        following = WorkFuture()
        following.set_running_or_notify_cancel()

        def ended(_: Future[Any]) -> None:
            try:
                value = callback(self)
            except BaseException as error:
                following.set_exception(error)
                if not isinstance(error, Exception):  # of a signal handler
                    raise
            else:
                following.set_result(value)

        self.add_done_callback(ended)
        return following


class _Following(Work):
    """A Work that ends after other works. Testing it tests them.

    Args:
        name: The name of the whole, for messages. Empty for the name of the first part.
        parts: The works. The first error among them, in order, becomes the error of the whole.
        result: Returns the result once all parts have ended without an error.
    """

    def __init__(self, name: str, parts: Sequence[Work], result: Callable[[], Any]) -> None:
        super().__init__(name, self._drive_parts)
        self._parts = parts
        self._result = result
        self._ended = itertools.count(1)
        limit: float | None = 0.0
        for part in parts:
            limit = None if limit is None or part.limit is None else max(limit, part.limit)
            part.add_done_callback(self._part_ended)
        self.limit = limit

    @property
    def name(self) -> str:
        return self._name or self._parts[0].name

    def _part_ended(self, _: Work) -> None:
        # Testing the other works here would end them in nested calls.
        if next(self._ended) < len(self._parts):
            return
        result = self._result
        del self._result  # it may keep much memory
        value = error = None
        for part in self._parts:
            error = part._error if error is None else error
        try:
            if error is None:
                value = result()
        except BaseException as failure:  # of a signal handler, too
            self.complete(error=failure)
            if not isinstance(failure, Exception):
                raise
        else:
            self.complete(value, error)

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

    def _drive_parts(self, _: Work, deadline: float) -> None:
        for part in self._parts:
            if not part.is_completed():
                part.block(deadline)
        if not self._done and all(part.is_completed() for part in self._parts):
            self.wait_for_event(deadline)  # perhaps another thread ends it next


def gather_works(name: str, works: list[Work]) -> Work:
    """Return one handle for several works, with the list of their results.

    Args:
        name: The name of the whole, for messages.
        works: The works. The first error among them, in order, becomes the error of the whole.
    """
    whole = _Following(name, works, lambda: [part._value for part in works])
    if not works:
        whole.complete([])
    return whole


def _settle(work: Work) -> None:
    future = work.get_future()
    if future.done():  # past its time limit
        return
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
        self._works: list[tuple[Work, ExitStack, float]] = []  # with deadlines
        self._running = False

    def add(self, work: Work) -> None:
        """Drive a work until it has ended."""
        waits = ExitStack()
        waits.enter_context(work.waiting())
        deadline = math.inf if work.limit is None else time.monotonic() + work.limit
        with self._lock:
            self._works.append((work, waits, deadline))
            if not self._running:
                threading.Thread(target=self._run, name="mpidist-futures", daemon=True).start()
                self._running = True

    def _run(self) -> None:
        # A turn takes 0.2 ms, so the thread sleeps only after a second. Large reductions make
        # progress only while it tests them.
        backoff = Backoff(5000)
        for turn in itertools.count():
            with self._lock:
                works, self._works = self._works, []
                late, now = [], time.monotonic()
                for work, waits, deadline in works:
                    if work._done:
                        waits.close()
                        backoff.reset()
                    elif now < deadline:
                        self._works.append((work, waits, deadline))
                    else:  # it is driven on, for the other ranks
                        late.append(work)
                        self._works.append((work, waits, math.inf))
                pending = [work for work, *_ in self._works]
                self._running = bool(pending)
            if not pending or fork.mpi_has_ended():
                return
            try:
                for work in late:
                    with suppress(InvalidStateError):  # the work has ended meanwhile
                        work.get_future().set_exception(work.past_limit(work.limit))
                for work in pending:
                    work.is_completed()  # this tests the requests of MPI
                # Other works make progress only while a thread waits for one of them.
                work = pending[turn % len(pending)]
                work.block(time.monotonic() + _SLICE_S)
            except BaseException:  # of a callback; the thread must go on
                logger.exception("a callback of %r failed", work)
            backoff.pause()


_driver = _Driver()
os.register_at_fork(after_in_child=_driver.reset)
