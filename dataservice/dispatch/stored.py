"""The registry's records as the journal keeps them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataservice.dispatch.records import Client, Dataset, Iteration, Job, Part, Task, Worker
from dataservice.dispatch.registry import Registry
from dataservice.dispatch.splits import Cursors, Granted
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.wire import Array, Parcel

Tables = Mapping[str, Mapping[int, bytes]]


def record_of(value: Any, parcels: Mapping[int, Parcel]) -> bytes:
    """Local. A record as bytes.

    Args:
        value: One of the registry's records.
        parcels: The datasets themselves, by id.
    """
    message = _MESSAGES[type(value)](value)
    if isinstance(value, Dataset):
        parcel = parcels[value.id]
        message.request.pickle = parcel.pickle
        message.buffers.extend(bytes(buffer.data) for buffer in parcel.buffers)
    data: bytes = message.SerializeToString()
    return data


def restore(registry: Registry, tables: Tables, now: float) -> dict[int, Parcel]:
    """Local. Fill a registry with what a journal has.

    Args:
        registry: A new one.
        tables: Records by kind and id.
        now: When all who are known count as heard of.

    Returns:
        The datasets themselves, by id.
    """
    parcels = {}
    for key, data in sorted(tables.get("dataset", {}).items()):
        stored = pb.StoredDataset.FromString(data)
        parcels[key] = Parcel(stored.request.pickle, [_array(each) for each in stored.buffers])
        stored.request.ClearField("pickle")
        registry.restore_dataset(Dataset(key, stored.request))
    for key, data in sorted(tables.get("worker", {}).items()):
        worker = pb.StoredWorker.FromString(data)
        registry.homes.admit(worker.address, [each.address for each in registry.workers.values()])
        registry.workers[key] = Worker(key, worker.address, worker.process, tuple(worker.tags), now)
    for key, data in sorted(tables.get("job", {}).items()):
        job = pb.StoredJob.FromString(data)
        dataset = registry.datasets[job.dataset_id]
        registry.restore_job(Job(key, job.name, dataset, job.terms, {}, set(job.finished)))
    for key, data in sorted(tables.get("iteration", {}).items()):
        _restore_iteration(registry, key, pb.StoredIteration.FromString(data), now)
    for key, data in sorted(tables.get("part", {}).items()):
        _restore_part(registry, key, pb.StoredPart.FromString(data))
    for key, data in sorted(tables.get("client", {}).items()):
        _restore_client(registry, key, pb.StoredClient.FromString(data), now)
    return parcels


def part_state(part: Part) -> pb.PartState:
    """Local. Where a part is."""
    return pb.PartState(
        part=part.number,
        start=part.start,
        checkpoint=part.checkpoint,
        splits=part.granted.state(),
        total=part.total,
    )


def held_of(part: Part) -> list[pb.Held]:
    """Local. What clients have got of a part from workers that were lost."""
    return [
        pb.Held(client_id=client_id, ranges=pb.Ranges(part=part.number, bounds=ranges.bounds))
        for client_id, ranges in part.held.items()
    ]


def _array(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def _dataset(value: Dataset) -> pb.StoredDataset:
    return pb.StoredDataset(request=value.request)


def _worker(value: Worker) -> pb.StoredWorker:
    return pb.StoredWorker(address=value.address, process=value.process, tags=value.tags)


def _job(value: Job) -> pb.StoredJob:
    return pb.StoredJob(
        name=value.name,
        dataset_id=value.dataset.id,
        terms=value.terms,
        finished=sorted(value.finished),
    )


def _iteration(value: Iteration) -> pb.StoredIteration:
    return pb.StoredIteration(
        job_id=value.job.id,
        repetition=value.repetition,
        seed=value.seed,
        begin=value.begin,
        cursors=value.cursors.state() if value.cursors is not None else (),
        dropped=value.dropped,
        served=sorted(value.served),
        joined=sorted(value.joined),
        code=value.failure[0],
        message=value.failure[1],
    )


def _part(value: Part) -> pb.StoredPart:
    task = value.task
    stored = pb.StoredPart(
        iteration_id=value.iteration.id,
        state=part_state(value),
        used=pb.Ranges(part=value.number, bounds=value.used.bounds),
        marks=value.marks,
        finished=value.finished,
        home=value.home,
        attempts=value.attempts,
        held=held_of(value),
    )
    if task is not None:
        stored.task_id, stored.worker_id = task.id, task.worker.id
        stored.running, stored.lost = task.running, task.lost
        stored.unsettled.extend(sorted(task.unsettled))
        stored.address = task.worker.address
    return stored


def _client(value: Client) -> pb.StoredClient:
    return pb.StoredClient(
        iteration_id=value.iteration.id,
        process=value.process,
        consumer_index=value.index,
        token=value.token,
    )


def _restore_iteration(
    registry: Registry, key: int, stored: pb.StoredIteration, now: float
) -> None:
    job = registry.jobs[stored.job_id]
    begin = stored.begin if stored.HasField("begin") else None
    cursors = None
    if job.terms.policy == pb.DYNAMIC and job.terms.reading != pb.ORDERED:
        cursors = Cursors(job.dataset.request.source_length, list(stored.cursors))
    iteration = Iteration(key, job, stored.repetition, stored.seed, begin, cursors)
    iteration.dropped = stored.dropped
    iteration.failure = stored.code, stored.message
    iteration.served, iteration.joined = set(stored.served), set(stored.joined)
    iteration.left = float("inf") if job.terms.reading == pb.SAVED else now
    job.iterations[stored.repetition] = registry.iterations[key] = iteration


def _restore_part(registry: Registry, key: int, stored: pb.StoredPart) -> None:
    iteration, state = registry.iterations[stored.iteration_id], stored.state
    part = Part(key, iteration, state.part, state.start, RangeSet(stored.used.bounds))
    part.marks = dict(stored.marks)
    part.held = {each.client_id: RangeSet(each.ranges.bounds) for each in stored.held}
    part.checkpoint.CopyFrom(state.checkpoint)
    part.granted = Granted.of(list(state.splits))
    part.attempts = stored.attempts
    part.total, part.finished, part.home = state.total, stored.finished, stored.home
    iteration.parts[state.part] = part
    if stored.task_id:
        worker = registry.workers.get(stored.worker_id)
        if worker is None:  # lost, and clients are still to say what has come of it
            worker = Worker(stored.worker_id, stored.address, "", (), 0.0)
        part.task = Task(stored.task_id, part, worker, stored.running, stored.lost)
        part.task.unsettled.update(stored.unsettled)
        registry.leases.known(part.task)


def _restore_client(registry: Registry, key: int, stored: pb.StoredClient, now: float) -> None:
    iteration = registry.iterations[stored.iteration_id]
    client = Client(key, iteration, stored.process, stored.consumer_index, stored.token, now)
    client.away = True  # until it is heard of
    registry.clients[key] = iteration.clients[key] = client
    iteration.left = float("inf")


_MESSAGES: dict[type, Any] = {
    Dataset: _dataset,
    Worker: _worker,
    Job: _job,
    Iteration: _iteration,
    Part: _part,
    Client: _client,
}
