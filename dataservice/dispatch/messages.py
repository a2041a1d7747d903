"""The registry as messages: replies of the dispatcher, and records of the journal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from dataservice.dispatch.records import (
    Client,
    Dataset,
    Granted,
    Iteration,
    Job,
    Part,
    Record,
    Task,
    Worker,
)
from dataservice.dispatch.registry import Registry
from dataservice.payload import Parcel
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from mpidist.errors import DataLossError, OpError


def iteration_response(client: Client) -> pb.IterationState:
    """Return the state of a client's iteration."""
    iteration = client.iteration
    state = pb.IterationState(
        finished=iteration.finished,
        version=iteration.version,
        dropped=iteration.dropped,
        over=client.dismissed,
        beat_soon=client.is_asked_for,
    )
    for part in iteration.parts.values():
        task = part.task
        if part.finished:
            # A part without elements may end before this client has asked for it.
            state.ended.add(part=part.number, total=part.total)
            continue
        if task is None:
            state.waiting += not part.fully_held
            state.given_out += part.fully_held
        elif task.lost:
            state.waiting += 1
            if client.id in task.pending_acks:
                state.settle.append(task.id)
        elif client.may_read(task.worker):
            state.tasks.add(task_id=task.id, worker=task.worker.address, part=part.number)
        else:
            state.elsewhere += iteration.job.mode.is_first_come
    return state


def task_response(task: Task) -> pb.Task:
    """Return the description of a task for its worker."""
    part, iteration = task.part, task.part.iteration
    terms = iteration.job.terms
    fixed = terms.num_shards or (terms.policy > pb.DYNAMIC and len(iteration.parts)) or 0
    return pb.Task(
        dataset_id=iteration.job.dataset.id,
        policy=terms.policy,
        repetition=iteration.repetition,
        seed=iteration.seed,
        part=part.number,
        consumption=terms.consumption,
        num_parts=fixed,
        num_consumers=terms.num_consumers,
        checkpoint=part.checkpoint,
        used=pb.Ranges(part=part.number, bounds=part.used.bounds),
        held=held_of(part),
        start=part.start,
        delivery=terms.delivery,
        path=terms.path,
        attempt=part.attempts,
    )


def state_response(iteration: Iteration, parts: Iterable[pb.PartState]) -> pb.State:
    """Return the state of an iteration for a consumer that is so far in some of its parts."""
    state = pb.State(
        summary=iteration.job.dataset.request.summary,
        identity=iteration.job.dataset.request.identity,
        terms=iteration.job.terms,
        seed=iteration.seed,
        repetition=iteration.repetition,
        next_index=iteration.next_index or 0,
    )
    asked = {part.part: part for part in parts}
    for number, part in sorted(iteration.parts.items()):
        position = state.parts.add()
        if number in asked:
            position.CopyFrom(asked[number])
        else:
            position.part, position.start = number, part.start
        position.total = part.total
        if not position.HasField("checkpoint"):
            position.checkpoint.CopyFrom(part.checkpoint)
        first = position.checkpoint
        position.splits.CopyFrom(part.granted.after(first.position).state())
    return state


def status_response(registry: Registry, now: float) -> pb.Status:
    """Return a report of the service for people."""
    status = pb.Status()
    for worker in registry.workers.values():
        silent_s = now - worker.last_seen
        status.workers.add(address=worker.address, silent_s=silent_s, work=worker.work)
    for iteration in registry.jobs.iterations.values():
        status.jobs.append(_job_status(iteration, now))
    return status


def _job_status(iteration: Iteration, now: float) -> pb.JobStatus:
    parts = iteration.parts.values()
    job = pb.JobStatus(
        name=iteration.job.name,
        dataset=iteration.job.dataset.request.summary,
        repetition=iteration.repetition,
        parts=len(parts),
        finished=sum(part.finished for part in parts),
        waiting=sum(part.task is None and not part.finished for part in parts),
    )
    for client in iteration.clients.values():
        job.clients.add(
            client_id=client.id,
            process=client.process,
            consumer_index=client.index,
            silent_s=now - client.last_seen,
            work=client.work,
        )
    return job


Tables = Mapping[str, Mapping[int, bytes]]


def record_of(value: Record, parcels: Mapping[int, Parcel]) -> bytes:
    """Encode a record.

    Args:
        value: One of the registry's records.
        parcels: The pickled datasets, by id.
    """
    message = _MESSAGES[value.kind](value)
    if isinstance(value, Dataset):
        parcel = parcels[value.id]
        message.request.pickle = parcel.pickle
        message.buffers.extend(bytes(buffer.data) for buffer in parcel.buffers)
    data: bytes = message.SerializeToString()
    return data


def restore(registry: Registry, tables: Tables, now: float) -> dict[int, Parcel]:
    """Fill a registry with the records of a journal.

    Args:
        registry: A new one.
        tables: Records by kind and id.
        now: The time at which all workers and consumers count as heard of.

    Returns:
        The pickled datasets, by id.

    Raises:
        DataLossError: A record does not fit those before it.
        InvalidArgumentError: A worker has none of the addresses that the dispatcher is configured
            with.
    """
    parcels: dict[int, Parcel] = {}
    for kind, restore_one in _RESTORED.items():
        for key, data in sorted(tables.get(kind, {}).items()):
            try:
                restore_one(registry, key, data, now)
                if kind == "dataset":
                    parcels[key] = _parcel(data)
            except OpError:  # the configuration is wrong, not the record
                raise
            except Exception as error:
                raise DataLossError(
                    f"{kind} {key} contradicts the other records: {error!r}"
                ) from error
    return parcels


def part_state(part: Part) -> pb.PartState:
    """Return the position of a part, as states of iterations have it."""
    return pb.PartState(
        part=part.number,
        start=part.start,
        checkpoint=part.checkpoint,
        splits=part.granted.state(),
        total=part.total,
    )


def held_of(part: Part) -> list[pb.Held]:
    """List the elements of a part that clients hold from workers that were lost."""
    return [
        pb.Held(client_id=client_id, ranges=pb.Ranges(part=part.number, bounds=ranges.bounds))
        for client_id, ranges in part.held.items()
    ]


def _dataset(value: Dataset) -> pb.StoredDataset:
    return pb.StoredDataset(request=value.request)


def _restore_dataset(registry: Registry, key: int, data: bytes, _: float) -> None:
    stored = pb.StoredDataset.FromString(data)
    stored.request.ClearField("pickle")
    registry.datasets.restore(Dataset(key, stored.request))


def _parcel(data: bytes) -> Parcel:
    stored = pb.StoredDataset.FromString(data)
    return Parcel(stored.request.pickle, [np.frombuffer(each, np.uint8) for each in stored.buffers])


def _worker(value: Worker) -> pb.StoredWorker:
    return pb.StoredWorker(address=value.address, process=value.process, tags=value.tags)


def _restore_worker(registry: Registry, key: int, data: bytes, now: float) -> None:
    stored = pb.StoredWorker.FromString(data)
    living = [each.address for each in registry.workers.values()]
    registry.scheduler.slots.assign(stored.address, living)
    worker = Worker(key, stored.address, stored.process, tuple(stored.tags), now)
    worker.is_known_to_live = False
    registry.workers[key] = worker


def _job(value: Job) -> pb.StoredJob:
    return pb.StoredJob(
        name=value.name,
        dataset_id=value.dataset.id,
        terms=value.terms,
        finished=sorted(value.finished),
    )


def _restore_job(registry: Registry, key: int, data: bytes, _: float) -> None:
    stored = pb.StoredJob.FromString(data)
    dataset = registry.datasets.by_id[stored.dataset_id]
    job = Job(key, stored.name, dataset, stored.terms, finished=set(stored.finished))
    registry.jobs.restore_job(job)


def _iteration(value: Iteration) -> pb.StoredIteration:
    return pb.StoredIteration(
        job_id=value.job.id,
        repetition=value.repetition,
        seed=value.seed,
        begin=value.begin,
        next_index=value.next_index or 0,
        dropped=value.dropped,
        served=sorted(value.served),
        joined=sorted(value.joined),
        code=value.failure[0],
        message=value.failure[1],
    )


def _restore_iteration(registry: Registry, key: int, data: bytes, now: float) -> None:
    stored = pb.StoredIteration.FromString(data)
    job = registry.jobs.by_id[stored.job_id]
    begin = stored.begin if stored.HasField("begin") else None
    next_index = stored.next_index if job.mode.takes_splits(job.terms) else None
    iteration = Iteration(key, job, stored.repetition, stored.seed, begin, next_index)
    iteration.dropped = stored.dropped
    iteration.failure = stored.code, stored.message
    iteration.served, iteration.joined = set(stored.served), set(stored.joined)
    iteration.left = float("inf") if job.mode.writes_snapshot else now
    registry.jobs.restore_iteration(iteration)


def _client(value: Client) -> pb.StoredClient:
    return pb.StoredClient(
        iteration_id=value.iteration.id,
        process=value.process,
        consumer_index=value.index,
        token=value.token,
    )


def _restore_client(registry: Registry, key: int, data: bytes, now: float) -> None:
    stored = pb.StoredClient.FromString(data)
    iteration = registry.jobs.iterations[stored.iteration_id]
    client = Client(key, iteration, stored.process, stored.consumer_index, stored.token, now)
    client.away = True  # until it is heard of
    registry.clients[key] = iteration.clients[key] = client
    iteration.left = float("inf")


def _part(value: Part) -> pb.StoredPart:
    task = value.task
    stored = pb.StoredPart(
        iteration_id=value.iteration.id,
        state=part_state(value),
        used=pb.Ranges(part=value.number, bounds=value.used.bounds),
        marks=value.watermarks,
        finished=value.finished,
        home=value.slot,
        attempts=value.attempts,
        held=held_of(value),
    )
    if task is not None:
        stored.task_id, stored.worker_id = task.id, task.worker.id
        stored.running, stored.lost = task.running, task.lost
        stored.unsettled.extend(sorted(task.pending_acks))
        stored.address = task.worker.address
    return stored


def _restore_part(registry: Registry, key: int, data: bytes, _: float) -> None:
    stored = pb.StoredPart.FromString(data)
    iteration, state = registry.jobs.iterations[stored.iteration_id], stored.state
    part = Part(key, iteration, state.part, state.start, RangeSet(stored.used.bounds))
    part.watermarks = dict(stored.marks)
    part.held = {each.client_id: RangeSet(each.ranges.bounds) for each in stored.held}
    part.checkpoint.CopyFrom(state.checkpoint)
    part.granted = Granted.of(state.splits)
    part.attempts = stored.attempts
    part.total, part.finished, part.slot = state.total, stored.finished, stored.home
    iteration.parts[state.part] = part
    if not stored.task_id:
        return
    if stored.lost and stored.worker_id not in registry.workers:
        # The worker is forgotten, but clients still have to report the elements that they hold of
        # the part.
        worker = Worker(stored.worker_id, stored.address, "", (), 0.0)
    else:
        worker = registry.workers[stored.worker_id]
    part.task = Task(stored.task_id, part, worker, stored.running, stored.lost)
    part.task.pending_acks.update(stored.unsettled)
    registry.scheduler.restore(part.task)


_MESSAGES: dict[str, Callable[[Any], Any]] = {
    "dataset": _dataset,
    "worker": _worker,
    "job": _job,
    "iteration": _iteration,
    "client": _client,
    "part": _part,
}

# In this order: each belongs to some before it.
_RESTORED: dict[str, Callable[[Registry, int, bytes, float], None]] = {
    "dataset": _restore_dataset,
    "worker": _restore_worker,
    "job": _restore_job,
    "iteration": _restore_iteration,
    "client": _restore_client,
    "part": _restore_part,
}
