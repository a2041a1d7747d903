import gc
import threading
import time
import traceback

import pytest

from dataservice import Dataset


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "dataservice-prefetch"]


def wait_until(condition, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_order_and_end():
    with iter(Dataset.range(100).prefetch(3)) as elements:
        assert [int(element) for element in elements] == list(range(100))
    wait_until(lambda: not prefetch_threads())


def test_elements_are_made_ahead_but_not_more():
    made = []
    ahead = threading.Semaphore(0)

    def make(i):
        made.append(int(i))
        ahead.release()
        return i

    with iter(Dataset.range(10).map(make).prefetch(3)) as elements:
        assert next(elements) == 0
        # Three lie ready beside it.
        for _ in range(4):
            assert ahead.acquire(timeout=10)
        assert made == [0, 1, 2, 3]
        next(elements)
        assert ahead.acquire(timeout=10)
        assert made == [0, 1, 2, 3, 4]


def test_errors_keep_type_and_traceback():
    def fail_at_three(i):
        if i == 3:
            raise ZeroDivisionError("three")
        return i

    elements = iter(Dataset.range(9).map(fail_at_three).prefetch(9))
    assert [next(elements) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="three") as caught:
        next(elements)
    assert [int(element) for element in elements] == [4, 5, 6, 7, 8]
    assert "fail_at_three" in "".join(traceback.format_tb(caught.value.__traceback__))
    elements.close()


@pytest.mark.parametrize("how", ["drop", "close"])
def test_no_thread_is_left(how):
    elements = iter(Dataset.range(10**6).prefetch(2).map(lambda i: i).batch(2).prefetch(2))
    next(elements)
    assert len(prefetch_threads()) == 2
    if how == "close":
        elements.close()
        assert list(elements) == []
    del elements
    gc.collect()
    wait_until(lambda: not prefetch_threads())


def test_no_thread_is_left_by_repetitions():
    assert len(list(Dataset.range(3).prefetch(2).repeat(20))) == 60
    wait_until(lambda: not prefetch_threads())
