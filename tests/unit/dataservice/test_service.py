"""Dispatcher, workers and consumers in one process."""

import statistics
import threading
import time
from collections import Counter

import numpy as np
import pytest
from _cases.endpoints import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataservice import Dataset, distribute
from mpidist.errors import InvalidArgumentError

MODES = ["parallel_epochs", "distributed_epoch"]
service_settings = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


EVENTS = {}


def event(name):
    """Return an event shared by all copies of a function, which is pickled for the worker."""
    return EVENTS.setdefault(name, threading.Event())


def values(dataset):
    return [int(element) for element in dataset]


def consume(count, function):
    """Run ``function(i)`` on ``count`` threads and return the results."""
    results = [None] * count

    def run(i):
        results[i] = function(i)

    running = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
        assert not thread.is_alive()
    return results


# Results


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_keeps_the_order(make_service, mode):
    service = make_service(1)
    dataset = Dataset.range(1000).map(lambda i: 3 * i).apply(distribute(mode, service.target))
    assert values(dataset) == list(range(0, 3000, 3))


@pytest.mark.parametrize("workers", [2, 3])
def test_parallel_epochs_give_a_copy_a_worker(make_service, workers):
    service = make_service(workers)
    dataset = Dataset.range(100).apply(distribute("parallel_epochs", service.target))
    assert Counter(values(dataset)) == dict.fromkeys(range(100), workers)


@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 9), st.integers(0, 3))
@service_settings
def test_a_distributed_epoch_is_the_dataset_once(make_service, count, repeats, batch, skip):
    service = make_service(2)
    dataset = Dataset.range(count).skip(skip).shuffle(20).repeat(repeats).batch(batch)
    dataset = dataset.apply(distribute("distributed_epoch", service.target))
    counts = Counter(int(i) for batch in dataset for i in batch)
    assert counts == dict.fromkeys(range(skip, count), repeats)


def test_elements_are_nested_and_equal_to_local_ones(make_service):
    service = make_service(1)
    rows = np.random.default_rng(0).normal(size=(10, 300, 200)).astype(np.float32)
    local = Dataset.from_tensor_slices({"x": rows, "y": (np.arange(10), rows[:, 0])}).batch(4)
    remote = local.apply(distribute("parallel_epochs", service.target))
    for expected, element in zip(local, remote, strict=True):
        np.testing.assert_array_equal(element["x"], expected["x"])
        np.testing.assert_array_equal(element["y"][0], expected["y"][0])
        np.testing.assert_array_equal(element["y"][1], expected["y"][1])
        assert element["x"].dtype == np.float32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "empty", [Dataset.range(0), Dataset.range(3).batch(5, drop_remainder=True)]
)
def test_empty_datasets(make_service, mode, empty):
    service = make_service(2)
    assert list(empty.apply(distribute(mode, service.target))) == []


def test_cardinality(make_service):
    apply = distribute("parallel_epochs", make_service(0).target)
    assert Dataset.range(5).apply(apply).cardinality() == -2
    assert Dataset.range(0).apply(apply).cardinality() == 0
    assert Dataset.range(5).repeat().apply(apply).cardinality() == -1


def test_shuffles_differ_between_workers_unless_seeded(make_service):
    service = make_service(2)

    def copies(seed):
        # The name of the thread that runs the function tells the task of an element.
        dataset = Dataset.range(50).shuffle(50, seed)
        dataset = dataset.map(lambda i: (i, threading.current_thread().name))
        orders = {}
        for i, task in dataset.apply(distribute("parallel_epochs", service.target)):
            orders.setdefault(str(task), []).append(int(i))
        return list(orders.values())

    one, two = copies(seed=None)
    assert sorted(one) == sorted(two) == list(range(50))
    assert one != two
    one, two = copies(seed=5)
    assert one == two


# Iterations and jobs


def test_every_loop_is_a_new_iteration(make_service):
    service = make_service(2)
    dataset = Dataset.range(50).apply(distribute("distributed_epoch", service.target))
    for _ in range(3):
        assert sorted(values(dataset)) == list(range(50))


def test_repeat_after_distribute(make_service):
    service = make_service(1)
    dataset = Dataset.range(20).shuffle(20, seed=1)
    dataset = dataset.apply(distribute("distributed_epoch", service.target)).repeat(3)
    elements = values(dataset)
    epochs = [elements[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("consumers", [2, 3])
def test_consumers_of_one_name_share_each_epoch(make_service, consumers):
    service = make_service(2)

    def epochs(_):
        dataset = Dataset.range(500).map(lambda i: i)
        dataset = dataset.apply(distribute("distributed_epoch", service.target, job_name="shared"))
        return [values(dataset) for _ in range(4)]

    results = consume(consumers, epochs)
    for epoch in range(4):
        union = [element for result in results for element in result[epoch]]
        assert sorted(union) == list(range(500))


def test_other_names_see_everything(make_service):
    service = make_service(1)

    def run(i):
        apply = distribute("distributed_epoch", service.target, job_name=f"job {i}")
        return values(Dataset.range(100).apply(apply))

    assert consume(2, run) == [list(range(100))] * 2


def test_late_consumer_of_a_finished_iteration(make_service, caplog):
    caplog.set_level("INFO", "dataservice.read.fetcher")
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target, job_name="once")
    assert values(Dataset.range(10).apply(apply)) == list(range(10))
    late = Dataset.range(10).apply(apply)
    assert not caplog.records
    assert values(late) == []
    deadline = time.monotonic() + 10
    while "apply distribute() once" not in caplog.text:
        # The dispatcher may hear of the end a moment after the first consumer.
        assert values(Dataset.range(10).apply(apply)) == []
        assert time.monotonic() < deadline
    assert values(late) == list(range(10))  # its second pass is the job's second


def test_two_consumers_one_of_which_leaves(make_service):
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target, "job", max_outstanding_requests=1)

    def wait_at_fifty(i):
        assert i != 50 or event("one has left").wait(30)
        return i

    dataset = Dataset.range(100).map(wait_at_fifty)
    with iter(dataset.apply(apply)) as leaver:
        first = int(next(leaver))
    event("one has left").set()
    assert first == 0
    # Elements in flight to the consumer that left come to the other one.
    assert sorted(values(dataset.apply(apply))) == list(range(1, 100))


def test_a_name_with_other_parameters(make_service):
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target, job_name="job")
    values(Dataset.range(10).apply(apply))
    with pytest.raises(InvalidArgumentError, match=r"existing DYNAMIC over range\(0, 10, 1\)"):
        values(Dataset.range(11).apply(apply))


def test_the_result_of_a_service_can_go_through_another(make_service):
    inner, outer = make_service(1), make_service(2)
    dataset = Dataset.range(20).apply(distribute("distributed_epoch", inner.target))
    dataset = dataset.apply(distribute("parallel_epochs", outer.target))
    assert Counter(values(dataset)) == dict.fromkeys(range(20), 2)


def test_many_epochs_leave_nothing_behind(make_service):
    service = make_service(2)
    dataset = Dataset.range(5).apply(distribute("distributed_epoch", service.target))
    for _ in range(50):
        assert sorted(values(dataset)) == list(range(5))
    names = ("dataservice-consumer", "dataservice-task")
    deadline = time.monotonic() + 10
    while any(t.name.startswith(names) for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(1e-3)


# Bounds and speeds


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_is_asked_for_than_allowed(make_service, limit):
    service = make_service(3)
    apply = distribute("distributed_epoch", service.target, max_outstanding_requests=limit)
    assert sorted(values(Dataset.range(200).apply(apply))) == list(range(200))


@pytest.mark.parametrize("limit", [None, 1])
def test_a_slow_worker_does_not_hold_up_the_other(make_service, limit):
    service = make_service(2)
    blocked, free = f"blocked {limit}", f"free {limit}"

    def block_once(i):
        if i == 0:
            event(blocked).set()
            assert event(free).wait(30)
        return i

    apply = distribute("distributed_epoch", service.target, max_outstanding_requests=limit)
    with iter(Dataset.range(100).map(block_once).apply(apply)) as elements:
        got = [int(next(elements))]
        assert event(blocked).wait(10)
        # All elements that the other worker can reach come while this worker stands still. This
        # worker keeps one part of the source, and another part that it has requested in advance.
        started = time.monotonic()
        got += [int(next(elements)) for _ in range(70)]
        assert time.monotonic() - started < 5
        assert 0 not in got
        event(free).set()
        assert sorted(got + [int(element) for element in elements]) == list(range(100))


@pytest.mark.parametrize("mode", MODES)
def test_the_end_comes_with_the_last_element(make_service, mode):
    """Check the median delay of the end, because the process may lose its core in some passes."""
    dataset = Dataset.range(50).apply(distribute(mode, make_service(2).target))
    waited = []
    for _ in range(9):
        last = time.monotonic()
        for _ in dataset:
            last = time.monotonic()
        waited.append(time.monotonic() - last)
    assert statistics.median(waited) < 0.05


def test_a_worker_that_comes_during_an_iteration_takes_part(make_service):
    service = make_service(1)

    def wait_for_two(i):
        event("first worker").set()
        assert event("second worker").wait(30)
        return threading.current_thread().name

    dataset = Dataset.range(40).map(wait_for_two)
    elements = iter(dataset.apply(distribute("parallel_epochs", service.target)))

    def add_worker():
        assert event("first worker").wait(10)
        service.add_worker()
        event("second worker").set()

    threading.Thread(target=add_worker).start()
    counts = Counter(str(task) for task in elements)
    assert sorted(counts.values()) == [40, 40]


def test_who_comes_first_leaves_elements_to_others(make_service):
    service = make_service(2)

    def trainer():
        apply = distribute("distributed_epoch", service.target, job_name="shared")
        return Dataset.range(1000).batch(8).apply(apply)

    with iter(trainer()) as first:
        found = [next(first)]
        others = list(trainer())
        assert len(others) >= 100  # of 125
        found += list(first)
    assert sorted(np.concatenate(found + others).tolist()) == list(range(1000))


def test_who_has_used_many_holds_many(make_service):
    service = make_service(1)
    apply = distribute("distributed_epoch", service.target, job_name="shared")
    dataset = Dataset.range(1 << 20).apply(apply)
    with iter(dataset) as elements:
        for _ in range(40_000):
            next(elements)
        wait_until(lambda: elements._elements._fetcher.buffer.buffered > 1000)
