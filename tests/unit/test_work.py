"""The handle of asynchronous operations."""

import asyncio
import concurrent.futures
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import Work
from mpidist.errors import DeadlineExceededError, NotFoundError
from mpidist.work import gather_works, seconds

LIMIT_S = 30


def completed(name, value):
    work = Work(name)
    work.complete(value)
    return work


class Polled:
    """A Work that its waiting threads complete in the n-th round of polling."""

    def __init__(self, rounds, value=None, error=None):
        self.rounds, self.value, self.error = rounds, value, error
        self.work = Work("polled", self.drive)

    def drive(self, work, deadline):
        while not work.is_completed() and time.monotonic() < deadline:
            self.rounds -= 1
            if self.rounds <= 0:
                work.complete(self.value, self.error)


def test_going_on_then_done():
    work = Work("op")
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    assert repr(work) == "<Work op: pending>"
    work.complete(5)
    assert work.is_completed()
    assert work.is_success()
    assert work.wait() is True
    assert work.result() == 5
    assert repr(work) == "<Work op: done>"


def test_failed():
    work = Work("op")
    work.complete(error=NotFoundError("it is gone"))
    assert work.is_completed()
    assert not work.is_success()
    for _ in range(2):
        for use in (work.wait, work.result):
            with pytest.raises(NotFoundError, match="it is gone"):
                use()
    assert isinstance(work.exception(), NotFoundError)
    assert "failed: NotFoundError" in repr(work)


def test_only_the_first_end_counts():
    work, calls = Work("op"), []
    work.add_done_callback(calls.append)
    work.complete(1)
    work.complete(2)
    work.complete(error=KeyError())
    assert work.result() == 1
    assert calls == [work]


@pytest.mark.parametrize("timeout", [0, 0.01, timedelta(milliseconds=10)])
@pytest.mark.parametrize("make", [lambda: Work("op"), lambda: Polled(1 << 60).work])
def test_a_wait_that_ends_too_early_may_be_repeated(make, timeout):
    work = make()
    for _ in range(2):
        with pytest.raises(DeadlineExceededError, match=r"within 0(\.01)? s; after the timeout"):
            work.wait(timeout)
    assert not work.is_completed()
    work.complete(3)
    assert work.result(timeout) == 3


def test_time_limits():
    assert seconds(None) is None
    assert seconds(2) == seconds(timedelta(seconds=2)) == 2.0
    for limit in (-1, timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="cannot be negative"):
            Work("op").wait(limit)


@pytest.mark.parametrize("error", [None, KeyError("x")])
def test_several_threads_wait_for_another(error):
    work, begun = Work("op"), threading.Semaphore(0)

    def wait():
        begun.release()
        try:
            return work.result(LIMIT_S)
        except KeyError as got:
            return got

    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(wait) for _ in range(5)]
        for _ in waiting:
            assert begun.acquire(timeout=LIMIT_S)
        work.complete("value", error)
        assert [w.result(LIMIT_S) for w in waiting] == [error or "value"] * 5


def test_whoever_waits_drives():
    polled = Polled(100, "value")
    assert polled.work.result() == "value"
    assert polled.rounds == 0


def test_callbacks():
    work, log = Work("op"), []
    for n in range(3):
        work.add_done_callback(lambda w, n=n: log.append((n, w.result())))
    assert log == []
    work.complete("v")
    work.add_done_callback(lambda w: log.append((3, w.result())))
    assert log == [(n, "v") for n in range(4)]


def test_then():
    work = Work("op")
    following = work.then(lambda value: value + 1).then(str)
    assert not following.is_completed()
    work.complete(1)
    assert following.result() == "2"
    assert completed("op", 4).then(lambda value: value * 2).result() == 8


def test_then_with_errors():
    calls = []
    work = Work("op")
    after_error = work.then(calls.append)
    work.complete(error=NotFoundError("gone"))
    with pytest.raises(NotFoundError, match="gone"):
        after_error.wait()
    assert calls == []
    with pytest.raises(ZeroDivisionError):
        completed("op", 0).then(lambda value: 1 / value).wait()


def test_an_interrupt_in_what_follows_ends_it():
    def interrupted(value):
        raise KeyboardInterrupt

    work = Work("op")
    following = work.then(interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.complete(1)
    assert following.is_completed()
    with pytest.raises(KeyboardInterrupt):
        following.result()


def test_waiting_for_what_follows_drives():
    assert Polled(5, 2).work.then(lambda value: value * 10).result() == 20
    endless = Polled(1 << 60).work.then(str)
    with pytest.raises(DeadlineExceededError):
        endless.wait(0.01)


@pytest.mark.parametrize(
    "follow", [lambda work: work.then(lambda v: v), lambda work: gather_works("all", [work])]
)
def test_a_waiter_that_wakes_before_the_callbacks_have_run(follow):
    work, woken = Work("op"), threading.Event()
    # Callbacks run in order: the first callback holds its thread until the waiter is awake.
    work.add_done_callback(lambda _: woken.wait(LIMIT_S))
    following = follow(work)
    block = work.block

    def noted(deadline):
        block(deadline)
        woken.set()

    work.block = noted
    completing = threading.Thread(target=work.complete, args=("value",))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(following.result)
        completing.start()
        assert waiting.result(LIMIT_S) in ("value", ["value"])
        completing.join(LIMIT_S)


@settings(deadline=None)
@given(st.permutations(range(5)), st.sets(st.integers(0, 4)), st.booleans())
def test_gathering(order, failing, wait_first):
    parts = [Work(f"part {n}") for n in range(5)]
    whole = gather_works("all", parts)
    for n in order[:-1]:
        parts[n].complete(n, KeyError(n) if n in failing else None)
        assert not whole.is_completed()
    if wait_first:
        with pytest.raises(DeadlineExceededError):
            whole.wait(0)
    parts[order[-1]].complete(order[-1], KeyError(order[-1]) if order[-1] in failing else None)
    assert whole.is_completed()
    if failing:
        assert whole.exception().args == (min(failing),)
    else:
        assert whole.result() == [0, 1, 2, 3, 4]


def test_gathering_drives_all_parts():
    parts = [Polled(n, n).work for n in (5, 3, 1)]
    parts.append(completed("done", 0))
    assert gather_works("all", parts).result() == [5, 3, 1, 0]
    assert gather_works("none", []).result() == []
    slow = gather_works("all", [Polled(1 << 60).work, Polled(1).work])
    with pytest.raises(DeadlineExceededError, match="all has not completed"):
        slow.wait(0.01)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [None, KeyError("x")])
def test_futures(when, error):
    work = Work("op")
    if when == "before":
        work.complete(7, error)
    future = work.get_future()
    assert work.get_future() is future
    if when == "after":
        assert not future.done()
        work.complete(7, error)
    assert future.exception(LIMIT_S) is error
    assert error is not None or future.result(LIMIT_S) == 7


def test_the_future_of_a_work_that_waiters_drive():
    assert Polled(50, "value").work.get_future().result(LIMIT_S) == "value"


def test_futures_go_on_after_a_callback_that_exits():
    def leave(_):
        raise SystemExit(3)

    first = Polled(5).work
    first.then(leave)
    assert first.get_future().result(LIMIT_S) is None
    assert Polled(5, "next").work.get_future().result(LIMIT_S) == "next"


def test_a_future_cannot_be_cancelled():
    work = Work("op")

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(work.get_future()), 0)

    asyncio.run(give_up())
    assert not work.get_future().cancel()
    work.complete(1)
    assert work.get_future().result(0) == 1


def test_completing_from_many_threads():
    for _ in range(50):
        work, log = Work("op"), []
        work.add_done_callback(lambda w, log=log: log.append(w.result()))
        with ThreadPoolExecutor(4) as pool:
            for n in range(4):
                pool.submit(work.complete, n)
        assert log == [work.result()]


def test_a_callback_that_raises_concerns_nobody_else(caplog):
    work = Work("read")

    def fail(_):
        raise KeyError("lost")

    work.add_done_callback(fail)
    whole, following = gather_works("all", [work]), work.then(lambda value: value + 1)
    work.complete(3)
    assert whole.result(5) == [3]
    assert following.result(5) == 4
    work.add_done_callback(fail)
    assert caplog.text.count("a callback of <Work read: done> failed") == 2


@pytest.mark.parametrize("limit", ["30", b"1", object(), [1]])
def test_what_is_no_time_limit(limit):
    with pytest.raises(TypeError, match="number of seconds or a timedelta"):
        seconds(limit)


def test_nan_is_no_time_limit():
    with pytest.raises(ValueError, match="NaN"):
        seconds(float("nan"))


class EndsWhenLookedAt(Work):
    """A Work that completes when it is polled, like MPI requests."""

    def is_completed(self):
        self.complete(1)
        return True


def test_looking_at_the_whole_looks_at_its_parts(caplog):
    following = EndsWhenLookedAt("read").then(lambda value: value + 1)
    assert following.is_completed()
    assert following.result() == 2
    whole = gather_works("all", [EndsWhenLookedAt("read") for _ in range(5000)])
    assert whole.is_completed()
    assert whole.result() == [1] * 5000
    assert not caplog.records  # no recursion error: completions are not nested


def test_a_future_has_the_methods_of_torch():
    work = Work("something")
    future = work.get_future()
    assert isinstance(future, concurrent.futures.Future)
    doubled = future.then(lambda done: done.value() * 2)
    shown = doubled.then(lambda done: f"{done.wait()}")
    assert not shown.done()
    for early in (future, doubled, shown):
        with pytest.raises(RuntimeError, match=r"no value yet: wait\(\) for it"):
            early.value()
    seen = []
    future.add_done_callback(lambda done: seen.append(done is future))
    work.complete(21)
    assert (future.value(), doubled.wait(), shown.result()) == (21, 42, "42")
    assert future.then(lambda done: done.value()).value() == 21  # runs at once
    assert seen == [True]


def test_errors_in_futures():
    """Callbacks receive the error of the work and may handle it. A callback may also fail."""
    work = Work("something")
    handled = work.get_future().then(lambda done: type(done.exception()).__name__)
    passed_on = work.get_future().then(lambda done: done.value())
    last = handled.then(lambda done: 1 / 0)
    work.complete(error=KeyError("lost"))
    assert handled.value() == "KeyError"
    for use in (passed_on.wait, passed_on.value, work.get_future().wait):
        with pytest.raises(KeyError, match="lost"):
            use()
    with pytest.raises(ZeroDivisionError):
        last.wait()


def test_a_coroutine_awaits_a_future_of_a_work():
    work = Work("something")

    async def wait():
        return await asyncio.wrap_future(work.get_future().then(lambda done: done.value() + 1))

    threading.Timer(0, work.complete, (41,)).start()
    assert asyncio.run(wait()) == 42
