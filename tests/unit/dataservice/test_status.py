"""The status of a service, and the time of its stages."""

import gc
import time
import weakref

import pytest
from _cases.endpoints import wait_until

from dataservice import Dataset, ServiceStatus, distribute, service_status
from dataservice.dataset.base import Context, StageTimes
from dataservice.status import ConsumerStatus, JobStatus, WorkerStatus
from mpidist.errors import UnavailableError


def worker(rate):
    return WorkerStatus("tcp://a:1", 0.0, 1, 100, rate, 1.0, ())


def job(*rates):
    return JobStatus("", "", 0, 1, 0, 0, tuple(ConsumerStatus("", 0, 0, 1, r, 0) for r in rates))


@pytest.mark.parametrize(
    ("workers", "consumers", "hint"),
    [
        ([10.0], [10.0], 1),
        ([10.0], [95.0], 10),
        ([10.0, 30.0], [50.0, 51.0], 6),
        ([10.0, 0.0], [15.0], 2),
        ([10.0], [0.5], 1),
        ([10.0], [0.0], None),
        ([0.0], [10.0], None),
        ([], [10.0], None),
    ],
)
def test_the_hint(workers, consumers, hint):
    status = ServiceStatus(tuple(map(worker, workers)), (job(*consumers),))
    assert status.scaling_hint() == hint


def test_a_service_with_work_to_do(make_service):
    service = make_service(2)

    def slow(i):
        time.sleep(2e-3)
        return i

    dataset = Dataset.range(10**6).map(slow).batch(2)
    apply = distribute("distributed_epoch", service.target, job_name="train")
    with iter(dataset.apply(apply)) as elements:

        def seen():
            next(elements)
            status = service_status(service.target)
            (only,) = status.jobs
            told = all(each.elements and each.busy and each.stages for each in status.workers)
            found.append(status)
            return told and only.consumers[0].elements > 20

        found = []
        wait_until(seen)
        status = found[-1]
    (train,) = status.jobs
    assert (train.name, train.dataset) == ("train", dataset.node.summary())
    assert (train.parts, train.finished, train.waiting) == (2, 0, 0)
    (consumer,) = train.consumers
    assert 0 < consumer.stalled <= 1
    assert [stage for stage, _ in status.workers[0].stages] == ["range", "map", "batch"]
    for each in status.workers:
        assert each.tasks == 1
        assert each.elements > 0
        assert 0 < each.busy <= 1
        assert dict(each.stages)["map"] > 0.5
    assert status.scaling_hint() >= 1


def test_an_idle_service(make_service):
    service = make_service(1)
    status = service_status(service.target)
    assert [each.tasks for each in status.workers] == [0]
    assert status.jobs == ()
    assert status.scaling_hint() is None


def test_no_service():
    with pytest.raises(UnavailableError, match="no dispatcher answers"):
        service_status("inproc://localhost:4831", timeout_s=0.05)
    with pytest.raises(ValueError, match="host:port"):
        service_status("nowhere")


def test_stages_count_what_is_theirs_alone(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    times = StageTimes()
    node = Dataset.range(4).map(lambda x: x).repeat(2).node
    with node.iterate(Context((0,), stages=times)) as elements:
        assert next(elements) == 0
        assert times.own_seconds() == [("range", 0.0), ("map", 0.0), ("repeat", 0.0)]
        times.on = True
        assert [int(each) for each in elements] == [1, 2, 3, 0, 1, 2, 3]
    # Each read of the clock takes a second. The innermost stage reads it once, and each outer stage
    # twice, for seven elements and the end.
    assert times.own_seconds() == [("range", 8.0), ("map", 16.0), ("repeat", 16.0)]


def test_datasets_that_functions_make_count_together_and_leave_nothing(monkeypatch):
    clock = iter(range(100_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    times = StageTimes()
    times.on = True
    made = weakref.WeakSet()

    def make(x):
        made.add((dataset := Dataset.range(3).map(lambda y: y)).node)
        return dataset

    node = Dataset.range(500).flat_map(make).node
    with node.iterate(Context((0,), stages=times)) as elements:
        assert sum(1 for _ in elements) == 1500
        gc.collect()
        assert len(made) < 5
    seconds = dict(times.own_seconds())
    assert set(seconds) == {"range", "map", "interleave"}
    # The source is asked 501 times for an element, and each of the 500 inner datasets 4 times.
    assert seconds["range"] == 501 + 500 * 4
    assert seconds["map"] == 2 * 500 * 4


def test_stages_on_a_thread_of_their_own():
    times = StageTimes()
    times.on = True
    node = Dataset.range(4).map(lambda x: (time.sleep(0.01), x)).prefetch(1).node
    with node.iterate(Context((0,), stages=times)) as elements:
        list(elements)
    seconds = dict(times.own_seconds())
    assert seconds["map"] >= 0.04
    assert min(seconds.values()) >= 0
