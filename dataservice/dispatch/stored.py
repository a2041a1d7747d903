"""The registry's records as the journal keeps them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from dataservice.dispatch.records import Client, Dataset, Iteration, Job, Part, Task, Worker
from dataservice.dispatch.registry import Registry
from dataservice.dispatch.splits import Granted
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.wire import Array, Parcel
from mpidist.errors import DataLossError, OpError

T = TypeVar("T")
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

    Raises:
        DataLossError: A record cannot be read, or does not fit those before it.
        InvalidArgumentError: A worker is none of those that the dispatcher is configured with.
    """
    parcels: dict[int, Parcel] = {}
    for key, data in _records(tables, "dataset"):
        with _fits("dataset", key):
            parcels[key] = _restore_dataset(registry, key, data)
    for kind, restore_one in _RESTORED.items():
        for key, data in _records(tables, kind):
            with _fits(kind, key):
                restore_one(registry, key, data, now)
    for part in (part for each in registry.iterations.values() for part in each.parts.values()):
        with _fits("part", part.id):
            _check_clients(part)
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
        next_index=value.next_index or 0,
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


def _records(tables: Tables, kind: str) -> list[tuple[int, bytes]]:
    return sorted(tables.get(kind, {}).items())


@contextmanager
def _fits(kind: str, key: int) -> Iterator[None]:
    """Name the record with which something is wrong."""
    try:
        yield
    except OpError:  # what is wrong is not the record
        raise
    except DecodeError as error:
        raise DataLossError(f"{kind} {key} cannot be read: {error}") from error
    except Exception as error:
        raise DataLossError(f"{kind} {key} contradicts the other records: {error}") from error


def _known(kind: str, records: Mapping[int, T], key: int) -> T:
    """A record to which another belongs."""
    if key not in records:
        raise ValueError(f"there is no {kind} {key}")
    return records[key]


def _check_free(what: str, place: object, taken: Container[Any]) -> None:
    """Two records must not be the same thing, of which one would be forgotten."""
    if place in taken:
        raise ValueError(f"there is another {what} {place}")


def _restore_dataset(registry: Registry, key: int, data: bytes) -> Parcel:
    stored = pb.StoredDataset.FromString(data)
    parcel = Parcel(stored.request.pickle, [_array(each) for each in stored.buffers])
    stored.request.ClearField("pickle")
    registry.restore_dataset(Dataset(key, stored.request))
    return parcel


def _restore_worker(registry: Registry, key: int, data: bytes, now: float) -> None:
    worker = pb.StoredWorker.FromString(data)
    living = [each.address for each in registry.workers.values()]
    _check_free("worker at", worker.address, living)
    registry.homes.admit(worker.address, living)
    restored = Worker(key, worker.address, worker.process, tuple(worker.tags), now)
    restored.is_known_to_live = False
    registry.workers[key] = restored


def _restore_job(registry: Registry, key: int, data: bytes, _: float) -> None:
    job = pb.StoredJob.FromString(data)
    dataset = _known("dataset", registry.datasets, job.dataset_id)
    registry.restore_job(Job(key, job.name, dataset, job.terms, {}, set(job.finished)))


def _restore_iteration(registry: Registry, key: int, data: bytes, now: float) -> None:
    stored = pb.StoredIteration.FromString(data)
    job = _known("job", registry.jobs, stored.job_id)
    _check_free(f"iteration of job {job.id} with repetition", stored.repetition, job.iterations)
    begin = stored.begin if stored.HasField("begin") else None
    shared = job.terms.policy == pb.DYNAMIC and job.terms.reading != pb.ORDERED
    next_index = stored.next_index if shared else None
    iteration = Iteration(key, job, stored.repetition, stored.seed, begin, next_index)
    iteration.dropped = stored.dropped
    iteration.failure = stored.code, stored.message
    iteration.served, iteration.joined = set(stored.served), set(stored.joined)
    iteration.left = float("inf") if job.terms.reading == pb.SAVED else now
    job.iterations[stored.repetition] = registry.iterations[key] = iteration


def _restore_part(registry: Registry, key: int, data: bytes, _: float) -> None:
    stored = pb.StoredPart.FromString(data)
    iteration, state = _known("iteration", registry.iterations, stored.iteration_id), stored.state
    _check_free(f"part of iteration {iteration.id} with number", state.part, iteration.parts)
    part = Part(key, iteration, state.part, state.start, RangeSet(stored.used.bounds))
    part.marks = dict(stored.marks)
    part.held = {each.client_id: RangeSet(each.ranges.bounds) for each in stored.held}
    part.checkpoint.CopyFrom(state.checkpoint)
    part.granted = Granted.of(state.splits)
    part.attempts = stored.attempts
    part.total, part.finished, part.home = state.total, stored.finished, stored.home
    iteration.parts[state.part] = part
    if stored.task_id:
        _restore_task(registry, part, stored)


def _restore_task(registry: Registry, part: Part, stored: pb.StoredPart) -> None:
    _check_free("task", stored.task_id, registry.leases.tasks)
    if stored.lost and stored.worker_id not in registry.workers:
        # Clients are still to say what has come of it.
        worker = Worker(stored.worker_id, stored.address, "", (), 0.0)
    else:
        worker = _known("worker", registry.workers, stored.worker_id)
    part.task = Task(stored.task_id, part, worker, stored.running, stored.lost)
    part.task.unsettled.update(stored.unsettled)
    registry.leases.known(part.task)


def _restore_client(registry: Registry, key: int, data: bytes, now: float) -> None:
    stored = pb.StoredClient.FromString(data)
    iteration = _known("iteration", registry.iterations, stored.iteration_id)
    client = Client(key, iteration, stored.process, stored.consumer_index, stored.token, now)
    client.away = True  # until it is heard of
    registry.clients[key] = iteration.clients[key] = client
    iteration.left = float("inf")


def _check_clients(part: Part) -> None:
    """Nobody would ever say what is waited for from clients that there are not."""
    waited_for = {*part.held, *(part.task.unsettled if part.task is not None else ())}
    for client_id in waited_for:
        _known(
            f"client of iteration {part.iteration.id} with id", part.iteration.clients, client_id
        )


_MESSAGES: dict[type, Any] = {
    Dataset: _dataset,
    Worker: _worker,
    Job: _job,
    Iteration: _iteration,
    Part: _part,
    Client: _client,
}

# In this order: each belongs to some before it.
_RESTORED: dict[str, Callable[[Registry, int, bytes, float], None]] = {
    "worker": _restore_worker,
    "job": _restore_job,
    "iteration": _restore_iteration,
    "part": _restore_part,
    "client": _restore_client,
}
