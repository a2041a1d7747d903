"""Elements that a stopped worker has made and no consumer has received are made again."""

import itertools
import threading
import time

import numpy as np
import pytest
from _cases import data_stops
from _cases.data_readers import reading

from dataservice import CrossTrainerCache, Dataset, ShardingPolicy, distribute
from dataservice.work import task as task_module

OFF = ShardingPolicy.OFF


@pytest.fixture(autouse=True)
def events(monkeypatch):
    """Take a checkpoint after every element, so that no test depends on timing."""
    monkeypatch.setattr(task_module, "_PERIOD_S", 0.0)
    monkeypatch.setattr(task_module, "_SHARE", 0)
    data_stops.ASKED.queue.clear()
    for event in (data_stops.CLOSED, data_stops.HOLDS, data_stops.PICKLING, data_stops.GO_ON):
        event.clear()
    yield
    data_stops.GO_ON.set()


def test_states_that_are_too_large_are_told_once_and_not_pickled(make_service, monkeypatch, caplog):
    sizes, dumps = [], task_module.dumps

    def counted(state):
        data = dumps(state)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(task_module, "dumps", counted)
    service = make_service(1)
    dataset = (
        Dataset.range(300)
        .filter(lambda x: True)
        .map(lambda x: np.full(200_000, x % 7, np.uint8))
        .shuffle(50, seed=1)
        .apply(distribute("distributed_epoch", service.target))
    )
    deadline = time.monotonic() + data_stops.LIMIT_S
    with iter(dataset) as elements:
        next(elements)
        while not any("the state of its iterator" in text for text in caplog.messages):
            assert time.monotonic() < deadline
        for _ in range(100):
            next(elements)
    assert sum("the state of its iterator" in text for text in caplog.messages) == 1
    assert max(sizes, default=0) <= 1 << 20


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "shared"])
def test_a_worker_that_is_stopped_during_a_heartbeat(make_service, cached):
    service = make_service(1)
    first = Dataset.from_source(data_stops.Held()).apply(distribute(OFF, service.target, "first"))
    options = {"cross_trainer_cache": CrossTrainerCache("a")} if cached else {}
    second = Dataset.from_generator(data_stops.large).apply(
        distribute(OFF, service.target, "second", max_outstanding_requests=1, **options)
    )
    with reading(first, second) as (held, elements):
        next(held)
        got = [int(next(elements)[0])]
        # The worker has made 1 and 2, but the consumer has no room for them.
        while data_stops.ASKED.get(timeout=data_stops.LIMIT_S) < 3:
            pass
        # The heartbeat blocks in the first task and reaches the second task later.
        data_stops.HOLDS.set()
        deadline = time.monotonic() + data_stops.LIMIT_S
        while not data_stops.PICKLING.is_set():
            next(held)
            assert time.monotonic() < deadline
        stop = threading.Thread(target=service.workers[0].stop)
        stop.start()
        assert data_stops.CLOSED.wait(data_stops.LIMIT_S)
        data_stops.GO_ON.set()
        stop.join()
        service.add_worker()
        got += [int(next(elements)[0]) for _ in range(7)]
    if cached:
        # The new worker may repeat elements that the consumer has received.
        assert max(b - a for a, b in itertools.pairwise(got)) == 1, got
    else:
        assert sorted(got) == list(range(8))
