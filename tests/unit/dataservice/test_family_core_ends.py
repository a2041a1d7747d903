"""Requirements on every data service: failures, early ends, silence, and stuck workers."""

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from _cases.endpoints import wait_until

from dataservice import (
    CrossTrainerCache,
    Dataset,
    ShardingPolicy,
    distribute,
    from_dataset_id,
    register_dataset,
)
from mpidist.errors import NotFoundError, OutOfRangeError, UnavailableError

OFF, DYNAMIC = MODES = ["parallel_epochs", "distributed_epoch"]
EVENTS = {}
LOCKS = {}


def event(name):
    """Return an event shared by all copies of a function, which is pickled for the worker."""
    return EVENTS.setdefault(name, threading.Event())


def comes_first(name):
    """Return whether this is the first call with the name."""
    return LOCKS.setdefault(name, threading.Lock()).acquire(blocking=False)


def values(dataset):
    return [int(element) for element in dataset]


def tasks(service):
    """Return the number of tasks on all workers."""
    return sum(len(worker._worker._tasks) for worker in service.workers)


def registry(service):
    return service.dispatcher._dispatcher._registry


# 8. Errors of users


class OwnError(Exception):
    """An exception with arguments that differ from its text."""

    def __init__(self, number, *, more=0):
        super().__init__(number)
        self.more = more

    def __reduce__(self):
        return _own_error, (self.args[0], self.more)


def _own_error(number, more):
    return OwnError(number, more=more)


ERRORS = {
    "an error of Python's": ValueError("three"),
    "a key": KeyError("three"),
    "one of ours": OutOfRangeError("three"),
    "a user's": OwnError(3, more=4),
    "division": ZeroDivisionError("division by three"),
    "an assertion": AssertionError("three"),
    "what ends an iteration": RuntimeError("generator raised StopIteration"),
    "a group": ExceptionGroup("three", [ValueError("a"), KeyError("b")]),
    "memory": MemoryError("three"),
    "a file": FileNotFoundError(2, "there is no three", "three.txt"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_ends_the_stream_and_stays(make_service, mode, name):
    error = ERRORS[name]

    def fail_at_three(i):
        if i == 3:
            raise error
        return i

    remote = Dataset.range(9).map(fail_at_three).apply(distribute(mode, make_service(1).target))
    with iter(remote) as elements:
        assert [int(next(elements)) for _ in range(3)] == [0, 1, 2]
        for _ in range(3):
            with pytest.raises(type(error)) as caught:
                next(elements)
            assert type(caught.value) is type(error)
            assert str(caught.value) == str(error)
            assert "raised in data worker inproc://localhost:" in caught.value.__notes__[0]
    if name == "a user's":
        assert caught.value.more == 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [2, 3])
def test_an_error_of_one_worker_ends_the_stream(make_service, mode, workers):
    def fail_at_three(i):
        assert i != 3, "three"
        return i

    remote = (
        Dataset.range(99).map(fail_at_three).apply(distribute(mode, make_service(workers).target))
    )
    with pytest.raises(AssertionError, match="three"):
        list(remote)
    # The next iteration is a new one.
    with pytest.raises(AssertionError, match="three"):
        list(remote)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(3).filter(lambda i: [][int(i)]),
        lambda: Dataset.range(3).flat_map(lambda i: [][int(i)]),
        lambda: Dataset.from_generator(lambda: [][0]),
        lambda: Dataset.range(3).map(lambda i: [][int(i)], 2),
        lambda: Dataset.range(3).map(lambda i: [][int(i)]).prefetch(2).batch(2),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_errors_of_every_function(make_service, mode, make):
    with pytest.raises(IndexError, match="list index out of range"):
        list(make().apply(distribute(mode, make_service(2).target)))


# 9. Garbage


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 3])
def test_what_nobody_reads_is_forgotten(make_service, mode, workers):
    service = make_service(workers)
    for _ in range(3):
        elements = iter(Dataset.range(10).repeat().apply(distribute(mode, service.target)))
        next(elements)
        assert tasks(service) >= 1
        elements.close()
        wait_until(lambda: tasks(service) == 0 and not registry(service).jobs.iterations)


@pytest.mark.parametrize("mode", MODES)
def test_one_reader_keeps_a_job(make_service, mode):
    service = make_service(1, job_gc_timeout_ms=1)
    apply = distribute(mode, service.target, job_name="j", max_outstanding_requests=1)
    one, two = (iter(Dataset.range(10).repeat().apply(apply)) for _ in range(2))
    for elements in (one, two):
        next(elements)
    two.close()
    wait_until(lambda: len(registry(service).clients) == 1)
    assert len([next(one) for _ in range(50)]) == 50
    assert tasks(service) == len(registry(service).jobs.iterations) == 1
    one.close()
    wait_until(lambda: tasks(service) == 0 and not registry(service).jobs.iterations)


@pytest.mark.parametrize("mode", MODES)
def test_a_job_is_collected_and_made_again(make_service, mode):
    service = make_service(1, job_gc_timeout_ms=1)
    apply = distribute(mode, service.target, job_name="j")
    for _ in range(3):
        with iter(Dataset.range(10).repeat().apply(apply)) as elements:
            assert int(next(elements)) == 0
        wait_until(lambda: tasks(service) == 0 and not registry(service).jobs.iterations)


def test_a_job_waits_for_readers_until_its_time_is_over(make_service):
    service = make_service(1, job_gc_timeout_ms=-1)
    apply = distribute(DYNAMIC, service.target, job_name="j", max_outstanding_requests=1)
    with iter(Dataset.range(10).apply(apply)) as elements:
        assert int(next(elements)) == 0
    wait_until(lambda: not registry(service).clients)
    assert len(registry(service).jobs.iterations) == 1
    assert values(Dataset.range(10).apply(apply)) == list(range(1, 10))


def test_datasets_that_are_registered_stay(make_service):
    service = make_service(1, job_gc_timeout_ms=1)
    name = register_dataset(service.target, Dataset.range(3))
    for _ in range(2):
        assert values(from_dataset_id(OFF, service.target, name)) == [0, 1, 2]
        wait_until(lambda: not registry(service).jobs.iterations)


# 10. Silence


def drop_after(service, seconds):
    """Drop consumers after ``seconds`` of silence."""
    known = registry(service)
    known.timeouts = replace(known.timeouts, client_s=seconds)


def test_a_silent_consumer_is_dropped_and_told(make_service):
    service = make_service(1)

    def until_dropped(i):
        assert i == 0 or event("dropped").wait(30)
        return i

    # Consumers send a heartbeat every 250 ms.
    apply = distribute(OFF, service.target, max_outstanding_requests=1)
    with iter(Dataset.range(9).map(until_dropped).apply(apply)) as elements:
        assert int(next(elements)) == 0
        drop_after(service, 1e-3)
        wait_until(lambda: not registry(service).clients)
        for _ in range(2):
            with pytest.raises((NotFoundError, UnavailableError), match=r"not known|silent"):
                list(elements)
        event("dropped").set()


def test_who_has_not_begun_to_read_is_not_dropped(make_service):
    service = make_service(1, client_timeout_ms=1)
    elements = iter(Dataset.range(1).apply(distribute(OFF, service.target)))
    # Meanwhile the dispatcher looks for silent consumers several times.
    checks = service.dispatcher._dispatcher._next_check
    wait_until(lambda: service.dispatcher._dispatcher._next_check > checks + 0.5)
    drop_after(service, 60.0)
    assert int(next(elements)) == 0
    elements.close()


# 12. Numbers of elements

R = Dataset.range(10)


@pytest.mark.parametrize(
    ("dataset", "terms", "expected"),
    [
        (R, {"processing_mode": OFF}, -2),
        (R.repeat(), {"processing_mode": OFF}, -1),
        (R.take(0), {"processing_mode": OFF}, 0),
        (R, {"processing_mode": DYNAMIC}, 10),
        (R.take(2), {"processing_mode": DYNAMIC}, 2),
        (R.shuffle(3), {"processing_mode": DYNAMIC}, 10),
        (R.enumerate().map(lambda i, x: i), {"processing_mode": DYNAMIC}, 10),
        (R.concatenate(R), {"processing_mode": DYNAMIC}, 20),
        (R.repeat(2), {"processing_mode": DYNAMIC}, 20),
        (R.batch(3), {"processing_mode": DYNAMIC}, 4),
        (R.filter(bool).batch(3), {"processing_mode": DYNAMIC}, -2),
        (R.filter(bool), {"processing_mode": DYNAMIC}, -2),
        (R.repeat(), {"processing_mode": DYNAMIC}, -1),
        (R.take(0), {"processing_mode": DYNAMIC}, 0),
        (R, {"processing_mode": DYNAMIC, "job_name": "j"}, -2),
        (R.repeat(), {"processing_mode": ShardingPolicy.DATA}, -1),
        (R, {"processing_mode": ShardingPolicy.DATA}, -2),
        (R, {"processing_mode": DYNAMIC, "deterministic": True}, 10),
        (
            R.repeat(),
            {
                "processing_mode": OFF,
                "job_name": "j",
                "cross_trainer_cache": CrossTrainerCache("t"),
            },
            -1,
        ),
    ],
)
@pytest.mark.parametrize("by_id", [False, True])
def test_numbers_of_elements(make_service, dataset, terms, expected, by_id):
    target = make_service(0).target
    if by_id:
        remote = from_dataset_id(
            service=target, dataset_id=register_dataset(target, dataset), **terms
        )
        # The reader does not know the terms on which the cardinality depends.
        assert remote.cardinality() in (expected, -2)
    else:
        remote = dataset.apply(distribute(service=target, **terms))
        assert remote.cardinality() == expected
    if expected < 0:
        with pytest.raises(TypeError, match=r"infinite|unknown"):
            len(remote)


@pytest.mark.parametrize("mode", MODES)
def test_what_elements_are_like_stays(make_service, mode):
    dataset = Dataset.from_tensor_slices({"x": np.zeros((4, 3)), "y": np.arange(4)}).batch(2)
    remote = dataset.apply(distribute(mode, make_service(0).target))
    assert remote.element_spec == dataset.element_spec


# 13. Stuck workers


@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_that_hangs_does_not_hold_up_the_others(make_service, limit, workers):
    service = make_service(workers)
    first, free = f"hangs {limit} {workers}", f"free {limit} {workers}"
    only = f"only {limit} {workers}"

    def one_hangs(i):
        if i == 0 and comes_first(only):
            event(first).set()
            assert event(free).wait(30)
        return i

    apply = distribute(OFF, service.target, max_outstanding_requests=limit)
    with iter(Dataset.range(50).map(one_hangs).apply(apply)) as elements:
        found = [int(next(elements)) for _ in range(50 * (workers - 1))]
        assert event(first).is_set()
        assert Counter(found) == dict.fromkeys(range(50), workers - 1)
        event(free).set()
        assert Counter(found + values(elements)) == dict.fromkeys(range(50), workers)
