"""Closing and stopping while something is under way, in one process."""

import threading
import time

import pytest
from _cases.endpoints import wait_until

from dataservice import Dataset, distribute
from dataservice.work import worker
from dataservice.work.buffers import ElementBuffer
from dataservice.work.task import Task
from mpidist.errors import UnavailableError

EVENTS = {}


def event(name):
    """One event for all copies of a function: it is pickled on its way to the worker."""
    return EVENTS.setdefault(name, threading.Event())


def values(dataset):
    return [int(element) for element in dataset]


def task_threads():
    return [t for t in threading.enumerate() if t.name.startswith("dataservice-task")]


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "dataservice-prefetch"]


def consumer_threads():
    return [t for t in threading.enumerate() if t.name.startswith("dataservice-consumer")]


def test_an_iterator_that_is_closed_ends_its_tasks_at_once(make_service):
    service = make_service(0)
    for _ in range(2):
        service.add_worker(heartbeat_interval_ms=60_000)
    elements = iter(Dataset.range(3).repeat().apply(distribute("parallel_epochs", service.target)))
    next(elements)
    elements.close()
    assert list(elements) == []
    wait_until(lambda: not task_threads())


def close_generator(dataset):
    def generate():
        yield from dataset

    elements = generate()
    next(elements)
    elements.close()


def drop_iterator(dataset):
    next(dataset.as_numpy_iterator())


def break_loop(dataset):
    for _ in dataset:
        break


@pytest.mark.parametrize("leave", [close_generator, drop_iterator, break_loop])
def test_an_iterator_that_is_left_ends_its_tasks_and_its_thread(make_service, leave):
    service = make_service(2)
    leave(Dataset.range(3).repeat().apply(distribute("parallel_epochs", service.target)))
    wait_until(lambda: not task_threads() and not consumer_threads())


def test_closing_while_the_dispatcher_is_missing():
    dataset = Dataset.range(3).apply(distribute("parallel_epochs", "inproc://localhost:4711"))
    elements = iter(dataset)
    started = time.monotonic()
    elements.close()
    assert time.monotonic() - started < 5
    assert list(elements) == []


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_what_is_fetched_ahead_is_given_up_although_nothing_comes(make_service, layers, how):
    service = make_service(1)
    released = event(f"{layers} {how}")

    def wait_at_one(i):
        assert i != 1 or event(f"{layers} {how}").wait(30)
        return i

    dataset = Dataset.range(3).map(wait_at_one)
    dataset = dataset.apply(distribute("parallel_epochs", service.target)).repeat()
    for _ in range(layers):
        dataset = dataset.prefetch(2)
    elements = iter(dataset)
    assert next(elements) == 0
    if how == "close":
        elements.close()
    del elements
    wait_until(lambda: not prefetch_threads() and not consumer_threads())
    released.set()


def test_a_task_that_reads_from_another_service_is_given_up_although_nothing_comes(make_service):
    inner, outer = make_service(1), make_service(1)

    def wait_at_one(i):
        assert i != 1 or event("the outer task has ended").wait(30)
        return i

    dataset = Dataset.range(3).map(wait_at_one)
    dataset = dataset.apply(distribute("parallel_epochs", inner.target)).repeat()
    elements = iter(dataset.apply(distribute("parallel_epochs", outer.target)))
    assert next(elements) == 0
    elements.close()
    wait_until(lambda: not consumer_threads() and len(task_threads()) == 1)
    event("the outer task has ended").set()
    wait_until(lambda: not task_threads())


def test_stopping_a_worker_waits_once_for_all_functions_that_hang(make_service, monkeypatch):
    monkeypatch.setattr(worker, "_CLOSE_S", 0.5)
    service = make_service(1)

    def wait_at_one(i):
        assert i != 1 or event("the worker has been stopped").wait(30)
        return i

    dataset = Dataset.range(3).map(wait_at_one)
    apply = distribute("parallel_epochs", service.target, start_timeout_s=0.2)
    readers = [iter(dataset.apply(apply)) for _ in range(8)]
    for elements in readers:
        next(elements)
    started = time.monotonic()
    service.workers[0].stop()
    assert time.monotonic() - started < 3
    for elements in readers:
        with pytest.raises(UnavailableError, match=r"no data worker .*is left"):
            list(elements)
    event("the worker has been stopped").set()


def test_a_worker_that_rarely_tells_the_dispatcher_still_tells_its_consumers(
    make_service, monkeypatch
):
    monkeypatch.setattr(worker, "_LONGEST_ROUND_S", 0.01, raising=False)
    asked = []

    def ask(buffer, request, body, ask=ElementBuffer.ask):
        asked.append(body.sequence)
        ask(buffer, request, body)

    monkeypatch.setattr(ElementBuffer, "ask", ask)
    service = make_service(0)
    service.add_worker(heartbeat_interval_ms=60_000)

    def wait(i):
        assert event("consumers have been told").wait(30)
        return i

    dataset = Dataset.range(3).map(wait)
    with iter(dataset.apply(distribute("parallel_epochs", service.target))) as elements:
        reader = threading.Thread(target=next, args=[elements])
        reader.start()
        # Two requests are held; a third follows an answer with nothing.
        wait_until(lambda: len(asked) > 2)
        event("consumers have been told").set()
        reader.join()
        assert next(elements) == 1


def test_a_task_whose_thread_cannot_start_is_tried_again(make_service, monkeypatch):
    service = make_service(1)
    apply = distribute("parallel_epochs", service.target, job_name="job")

    def refuse():
        raise RuntimeError("can't start new thread")

    def make(task, *arguments, init=Task.__init__):
        init(task, *arguments)
        task.thread.start = refuse

    with monkeypatch.context() as patch:
        patch.setattr(Task, "__init__", make)
        with pytest.raises(UnavailableError, match="can't start new thread"):
            list(Dataset.range(3).apply(apply))
    assert values(Dataset.range(3).apply(apply)) == [0, 1, 2]


def test_a_worker_that_serves_no_more_counts_as_gone(make_service):
    service = make_service(2)
    remote = Dataset.range(4000).apply(distribute("distributed_epoch", service.target))
    with iter(remote) as elements:
        found = [int(next(elements))]
        # As while it is being stopped, in the moment before its endpoint is closed.
        service.workers[0]._endpoint.unregister("data_worker")
        found += [int(element) for element in elements]
    assert sorted(found) == list(range(4000))
