"""Maps of several elements at once."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from dataservice import Dataset
from dataservice.dataset.base import Context
from mpidist.errors import UnavailableError


def values(dataset):
    return [int(element) for element in dataset]


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("calls", [1, 3])
def test_the_same_elements(calls, deterministic, processes):
    offset = 7
    dataset = Dataset.range(50).map(lambda i: i * i + offset, calls, deterministic, processes)
    found = values(dataset)
    expected = [i * i + offset for i in range(50)]
    assert (found if deterministic else sorted(found)) == expected
    assert len(dataset) == 50


def test_as_many_at_once_as_are_asked_for():
    meeting = threading.Barrier(4)
    dataset = Dataset.range(8).map(lambda i: (meeting.wait(20), i)[1], num_parallel_calls=4)
    assert values(dataset) == list(range(8))


def test_who_is_ready_goes_first():
    go_on = threading.Event()
    dataset = Dataset.range(6).map(lambda i: (i or go_on.wait(20), i)[1], 2, deterministic=False)
    with iter(dataset) as elements:
        first = [int(next(elements)) for _ in range(5)]
        assert 0 not in first
        go_on.set()
        assert int(next(elements)) == 0


def test_processes_are_others():
    pids = set(values(Dataset.range(20).map(lambda i: os.getpid(), 2, processes=True)))
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids


def test_arrays_and_structures_travel():
    def make(a, b):
        return {"sum": a + b, "rows": (np.full((1000, 100), a), str(b))}

    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4, 8))
    found = list(pairs.map(make, 2, processes=True))
    assert [int(e["sum"]) for e in found] == [4, 6, 8, 10]
    assert all((e["rows"][0] == n).all() for n, e in enumerate(found))


def test_what_a_process_prints_is_no_answer(capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert values(Dataset.range(3).map(lambda i: (print("seen", i), i)[1], 1, processes=True)) == [
        0, 1, 2,
    ]  # fmt: skip
    shown, deadline = "", time.monotonic() + 30
    while "seen 2" not in shown and time.monotonic() < deadline:  # the process writes it itself
        shown += capfd.readouterr().err
    assert "seen 2" in shown


class Odd(Exception):
    def __init__(self, number, text):
        super().__init__(f"{number} {text}")


@pytest.mark.parametrize("processes", [False, True])
def test_errors_come_in_their_place(processes):
    def fail(i):
        if i == 3:
            raise ZeroDivisionError("three")
        return i

    with iter(Dataset.range(9).map(fail, 2, processes=processes)) as elements:
        assert [int(next(elements)) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ZeroDivisionError, match="three") as info:
            next(elements)
    told = "".join(getattr(info.value, "__notes__", []))
    assert not processes or "in fail" in told


def test_errors_that_cannot_be_sent():
    def fail(i):
        raise Odd(i, "what")

    with (
        iter(Dataset.range(2).map(fail, 1, processes=True)) as elements,
        pytest.raises(RuntimeError, match="0 what"),
    ):
        next(elements)


@pytest.mark.parametrize("processes", [False, True])
def test_stop_iteration_ends_nothing(processes):
    def stop(i):
        raise StopIteration

    with (
        iter(Dataset.range(3).map(stop, 2, processes=processes)) as elements,
        pytest.raises(RuntimeError, match="raised StopIteration"),
    ):
        next(elements)


def test_a_process_that_dies():
    def die(i):
        if i == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    with iter(Dataset.range(6).map(die, 1, processes=True)) as elements:
        assert [int(next(elements)) for _ in range(2)] == [0, 1]
        with pytest.raises(UnavailableError, match="ended with status -9"):
            next(elements)
        assert [int(element) for element in elements] == [3, 4, 5]  # another has taken its place


@pytest.mark.parametrize("processes", [False, True])
def test_nothing_runs_when_it_is_closed(processes):
    before = threading.active_count()
    elements = iter(Dataset.range(100).map(lambda i: os.getpid(), 3, processes=processes))
    pids = {int(next(elements)) for _ in range(9)}
    elements.close()
    assert next(elements, "over") == "over"
    for thread in threading.enumerate():
        if thread.name == "dataservice-map":
            thread.join(20)
    assert threading.active_count() <= before
    for pid in pids - {os.getpid()}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("threads", [0, 1])
def test_a_thread_that_cannot_be_started(monkeypatch, deterministic, threads):
    for thread in threading.enumerate():
        if thread.name == "dataservice-map":  # of an earlier pass
            thread.join(20)
    left, start = [None] * threads, threading.Thread.start
    refused = threading.Event()

    def refuse(thread):
        if thread.name == "dataservice-map":
            if not left:
                refused.set()
                raise RuntimeError("can't start new thread")
            left.pop()
        start(thread)

    elements = iter(Dataset.range(4).map(lambda i: (refused.wait(20), i)[1], 3, deterministic))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            list(elements)
    assert sorted(values(elements)) == [0, 1, 2, 3]  # nothing is lost
    elements.close()


@pytest.mark.parametrize("place", [0, 1, 5, 9, 10, 12])
@pytest.mark.parametrize("deterministic", [False, True])
def test_states(place, deterministic):
    dataset = Dataset.range(12).map(lambda i: i * 2, 3, deterministic).filter(lambda i: i != 20)
    elements = iter(dataset)
    first = [int(x) for _, x in zip(range(place), elements, strict=False)]
    later = iter(dataset)
    later.set_state(elements.get_state())
    rest = [int(x) for x in later]
    expected = [i * 2 for i in range(12) if i != 10]
    assert sorted(first + rest) == expected
    if deterministic:
        assert first + rest == expected
    elements.close()


def test_wrong_numbers():
    with pytest.raises(ValueError, match="at least 1, or AUTOTUNE, not 0"):
        Dataset.range(3).map(abs, 0)
    with pytest.raises(ValueError, match="num_parallel_calls"):
        Dataset.range(3).map(abs, processes=True)


def test_on_workers_elements_keep_their_order():
    """Another worker may have to go on, and must find the same element under each number."""
    go_on = threading.Event()

    def behind(i):  # the first is ready after the fourth
        if i == 3:
            go_on.set()
        return (i or go_on.wait(20), i)[1]

    node = Dataset.range(6).map(behind, 4, deterministic=False)._node
    with node.iterate(Context((0,), numbered=True)) as elements:
        assert [int(x) for x in elements] == list(range(6))
