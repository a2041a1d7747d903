"""Restarts, states and heartbeats in unusual situations."""

import itertools
import threading
import time

from _cases.data_registry import TIMEOUTS, Play, ranges, terms_of

from dataservice import Dataset, distribute
from dataservice.dispatch.messages import record_of, restore
from dataservice.dispatch.registry import Registry
from dataservice.payload import Parcel
from dataservice.proto import dataservice_pb2 as pb


def test_a_repetition_that_a_state_brings_back_is_not_over_after_a_restart():
    play, tables = Play(workers=1), {}

    def write():
        for (kind, key), value in play.registry.take_outcome().changed.items():
            table = tables.setdefault(kind, {})
            if value is None:
                table.pop(key, None)
            else:
                table[key] = record_of(value, {play.dataset.id: Parcel(b"", ())})

    client = play.join_ordered(0, 1, shards=1)
    (task,) = play.start(client)
    play.registry.finish_task(task, 3)
    play.leave(client, used=ranges(p0=[0, 3]))
    for job in play.registry.jobs.by_id.values():
        tables.setdefault("job", {})[job.id] = record_of(job, {})
    for kind, known in (
        ("dataset", play.registry.datasets.by_id),
        ("worker", play.registry.workers),
    ):
        for value in known.values():
            tables.setdefault(kind, {})[value.id] = record_of(
                value, {play.dataset.id: Parcel(b"", ())}
            )
    write()
    terms = terms_of(consumption=pb.DETERMINISTIC, num_consumers=1, num_shards=1)
    state = pb.State(
        identity=b"range", terms=terms, position=2, parts=[pb.PartState(start=2, total=-1)]
    )
    client = play.join_ordered(0, 1, shards=1, state=state)
    write()
    assert not client.iteration.finished
    restored = Registry(TIMEOUTS, itertools.count(1000))
    restore(restored, tables, 0.0)
    assert not restored.clients[client.id].iteration.finished


def test_a_heartbeat_of_a_used_part_without_bounds_changes_nothing():
    play = Play(workers=1)
    client = play.join()
    play.beat(client, used=[pb.Ranges(part=0)])


def test_a_state_that_cannot_be_pickled_does_not_end_a_workers_heartbeats(make_service):
    service = make_service(1)
    dataset = (
        Dataset.range(40)
        .map(lambda i: lambda: i)
        .shuffle(5, seed=1)
        .map(lambda make: (time.sleep(0.02), make())[1])
        .apply(distribute("distributed_epoch", service.target))
    )
    assert sorted(int(i) for i in dataset) == list(range(40))
    names = [thread.name for thread in threading.enumerate()]
    assert any(name.startswith("dataservice-worker-") for name in names)
