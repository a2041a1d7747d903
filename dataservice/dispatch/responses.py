"""The answers of the dispatcher, from its registry. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dataservice.dispatch.end_of_epoch import is_asked_for
from dataservice.dispatch.records import Client, Iteration, Task
from dataservice.dispatch.registry import Registry
from dataservice.dispatch.scheduler import may_read
from dataservice.dispatch.stored import held_of
from dataservice.proto import dataservice_pb2 as pb


def iteration_response(client: Client) -> pb.IterationState:
    """Return the state of a client's iteration."""
    iteration = client.iteration
    state = pb.IterationState(
        finished=iteration.finished,
        version=iteration.version,
        dropped=iteration.dropped,
        over=client.dismissed,
        beat_soon=is_asked_for(client),
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
        elif may_read(client, task.worker):
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
        status.jobs.append(_job(iteration, now))
    return status


def _job(iteration: Iteration, now: float) -> pb.JobStatus:
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
