"""The load of a data service, for people and for programs that scale it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dataservice.calls import dispatcher_of
from dataservice.proto import dataservice_pb2 as pb


@dataclass(frozen=True)
class WorkerStatus:
    """A data worker.

    Attributes:
        address: Its address.
        silent_s: Seconds since its last heartbeat.
        tasks: The number of its tasks that serve consumers.
        elements: The number of elements that these tasks have made so far.
        rate: Elements a second that the worker makes while it does not wait for consumers; 0 if
            not known.
        busy: Share of the time in which the worker does not wait for consumers, from 0 to 1.
        stages: Share of the time spent in each transformation, by name, from the source on.
    """

    address: str
    silent_s: float
    tasks: int
    elements: int
    rate: float
    busy: float
    stages: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ConsumerStatus:
    """A consumer's iterator.

    Attributes:
        process: Its process, as ``host/pid-token``.
        index: Its ``consumer_index``, in jobs that have one.
        silent_s: Seconds since its last heartbeat.
        elements: The number of elements that it has consumed.
        rate: Elements a second that it consumes while it does not wait for them; 0 if not known.
        stalled: Share of the time in which it waits for elements, from 0 to 1.
    """

    process: str
    index: int
    silent_s: float
    elements: int
    rate: float
    stalled: float


@dataclass(frozen=True)
class JobStatus:
    """An iteration of a job.

    Attributes:
        name: The job's name; empty if one consumer reads it alone.
        dataset: Description of the dataset.
        repetition: Number of the iteration within its job, from 0.
        parts: The number of parts.
        finished: The number of parts at their end.
        waiting: The number of parts without a worker.
        consumers: The consumers that read it.
    """

    name: str
    dataset: str
    repetition: int
    parts: int
    finished: int
    waiting: int
    consumers: tuple[ConsumerStatus, ...]


@dataclass(frozen=True)
class ServiceStatus:
    """A data service at one moment.

    Attributes:
        workers: The data workers.
        jobs: The iterations that the dispatcher keeps.
    """

    workers: tuple[WorkerStatus, ...]
    jobs: tuple[JobStatus, ...]

    def scaling_hint(self) -> int | None:
        """Return the number of workers like these that would keep consumers from waiting.

        It is the sum of the rates at which consumers could consume elements, divided by the mean
        rate at which a worker could make them: tf.data service's estimate (arXiv:2210.14826),
        without its bounds.

        Returns:
            At least 1; None while too little is known.
        """
        wanted = sum(consumer.rate for job in self.jobs for consumer in job.consumers)
        rates = [worker.rate for worker in self.workers if worker.rate]
        if not wanted or not rates:
            return None
        return max(math.ceil(wanted / (sum(rates) / len(rates))), 1)


def service_status(service: str | tuple[str, str], *, timeout_s: float = 10.0) -> ServiceStatus:
    """Ask a dispatcher for the load of its service.

    Args:
        service: As for :func:`distribute`.
        timeout_s: How long to try, in seconds.

    Raises:
        UnavailableError: No dispatcher answers.
        ValueError: The service is not an address.
    """
    with dispatcher_of(service) as dispatcher:
        status = dispatcher.call_with_retry(
            "dispatcher/GetStatus", pb.ClientRequest(), pb.Status, timeout_s
        )
    return ServiceStatus(
        tuple(_worker(worker) for worker in status.workers),
        tuple(_job(job) for job in status.jobs),
    )


def _worker(status: pb.WorkerStatus) -> WorkerStatus:
    elements = sum(work.elements for work in status.work)
    seconds = sum(work.seconds for work in status.work)
    busy = seconds - sum(work.waited_s for work in status.work)
    stages: dict[str, float] = {}
    for work in status.work:
        for stage in work.stages:
            stages[stage.name] = stages.get(stage.name, 0.0) + stage.seconds
    total = sum(stages.values())
    # The tasks of a worker run at the same time, so that their rates add up.
    rates = [w.elements / (w.seconds - w.waited_s) for w in status.work if w.seconds > w.waited_s]
    return WorkerStatus(
        status.address,
        status.silent_s,
        len(status.work),
        elements,
        sum(rates),
        busy / seconds if seconds else 0.0,
        tuple((name, s / total if total else 0.0) for name, s in stages.items()),
    )


def _job(status: pb.JobStatus) -> JobStatus:
    return JobStatus(
        status.name,
        status.dataset,
        status.repetition,
        status.parts,
        status.finished,
        status.waiting,
        tuple(_consumer(client) for client in status.clients),
    )


def _consumer(status: pb.ClientStatus) -> ConsumerStatus:
    work = status.work
    own = work.seconds - work.waited_s
    return ConsumerStatus(
        status.process,
        status.consumer_index,
        status.silent_s,
        work.elements,
        work.elements / own if own > 0 else 0.0,
        work.waited_s / work.seconds if work.seconds else 0.0,
    )
