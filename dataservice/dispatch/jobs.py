"""The jobs of a dispatcher, and their iterations. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dataservice.dispatch.datasets import Datasets
from dataservice.dispatch.homes import Homes
from dataservice.dispatch.leases import Leases, by_worker
from dataservice.dispatch.records import Client, Dataset, Iteration, Job, Task, Worker
from dataservice.dispatch.splits import Cursors
from dataservice.dispatch.terms import (
    check_same_begin,
    differ_in_consumers,
    is_behind,
    other_kind,
    read_as,
    told,
)
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError


class Jobs(Datasets):
    """The part of the registry that has jobs and iterations, and begins and forgets them.

    Args:
        ids: Where ids come from.
        homes: The places of workers under static sharding.
    """

    def __init__(self, ids: Iterator[int], homes: Homes) -> None:
        super().__init__(ids)
        self.homes = homes
        self.workers: dict[int, Worker] = {}
        self.jobs: dict[int, Job] = {}
        self._by_job_name: dict[str, Job] = {}
        self.iterations: dict[int, Iteration] = {}
        self.clients: dict[int, Client] = {}
        self.leases = Leases(self.ids, self.homes, self._touch)

    def restore_job(self, job: Job) -> None:
        """Local. Add a job as it is."""
        self.jobs[job.id] = job
        if job.name:
            self._by_job_name[job.name] = job

    # Saves

    def save(self, dataset_id: int, path: str, num_streams: int, seed: int) -> Iteration:
        """Local. Have workers save a dataset, in as many parts as there are streams.

        Raises:
            NotFoundError: The dataset is not known.
        """
        dataset = self.dataset(dataset_id)
        terms = pb.Terms(reading=pb.SAVED, num_shards=num_streams, path=path)
        job = Job(next(self.ids), "", dataset, terms)
        self.restore_job(job)
        self._outcome.changed["job", job.id] = job
        iteration = Iteration(next(self.ids), job, 0, seed, None, None)
        job.iterations[0] = self.iterations[iteration.id] = iteration
        self._touch(iteration)
        self.leases.begin(iteration)
        self.leases.place(iteration, self.workers.values())
        return iteration

    def fail_save(self, task_id: int, code: int, message: str) -> None:
        """Local. A worker cannot save its part."""
        task = self.leases.tasks.get(task_id)
        if task is not None and task.part.iteration.job.terms.reading == pb.SAVED:
            task.part.iteration.failure = code, message
            self._touch(task.part.iteration)

    def ended_saves(self) -> list[Iteration]:
        """Local. The saves with which workers are through."""
        return [
            iteration
            for iteration in self.iterations.values()
            if iteration.job.terms.reading == pb.SAVED
            and (iteration.finished or iteration.failure[0])
        ]

    def end_save(self, iteration: Iteration) -> None:
        """Local. All that was to be said of a save has been."""
        if iteration.id in self.iterations:
            self._forget(iteration)

    def tasks_to_begin(self, worker_id: int, most_saves: int) -> list[int]:
        """Return the ids of tasks that a worker has not begun, and of the saves that it shall run.

        Args:
            worker_id: The worker.
            most_saves: How many parts of saves it runs at a time.
        """
        served: list[int] = []
        saves: list[Task] = []
        for task in self.leases.tasks.values():
            if task.worker.id != worker_id or task.lost or task.part.finished:
                continue
            if task.part.iteration.job.terms.reading != pb.SAVED:
                served += [] if task.running else [task.id]
            elif task.part.iteration.wanted:
                saves.append(task)
        saves.sort(key=lambda task: (not task.running, task.id))  # what has begun goes on
        return served + [task.id for task in saves[:most_saves]]

    # Inside

    def _iteration(self, request: pb.IterationRequest, dataset: Dataset, seed: int) -> Iteration:
        splits = request.terms.policy == pb.DYNAMIC
        if splits and dataset.request.source_length < 0:
            raise FailedPreconditionError(
                f"{dataset.request.summary} cannot be split between workers"
            )
        if by_worker(request.terms) and not len(self.homes):
            raise NotFoundError(
                f"ShardingPolicy.{pb.ShardingPolicy.Name(request.terms.policy)} divides the "
                "dataset between workers that are known in advance: give the dispatcher "
                "DispatcherConfig(worker_addresses=...)"
            )
        begin = request.state if request.HasField("state") else None
        job = self._job(request, dataset, begin)
        iteration = job.iterations.get(request.repetition)
        if iteration is not None and begin is not None and is_behind(iteration, request):
            # Consumers that were restarted take the job back to where they are.
            self._forget(iteration)
            iteration = None
        if begin is not None and iteration is None:
            job.finished.discard(request.repetition)
            self._outcome.changed["job", job.id] = job
        if iteration is not None:
            check_same_begin(iteration, begin)
            return iteration
        cursors = None
        if splits and request.terms.reading != pb.ORDERED:
            known = list(begin.cursors) if begin is not None else None
            cursors = Cursors(dataset.request.source_length, known)
        iteration = Iteration(
            next(self.ids), job, request.repetition, begin.seed if begin else seed, begin, cursors
        )
        job.iterations[request.repetition] = iteration
        self.iterations[iteration.id] = iteration
        self._touch(iteration)
        self.leases.begin(iteration)
        return iteration

    def _job(self, request: pb.IterationRequest, dataset: Dataset, begin: pb.State | None) -> Job:
        summary = dataset.request.summary
        if begin is not None and other_kind(begin, summary, request.terms):
            raise InvalidArgumentError(
                f"the state belongs to an iterator over {begin.summary}, read as "
                f"{read_as(begin.terms)}, not over {summary}, read as {read_as(request.terms)}"
            )
        job = self._by_job_name.get(request.job_name) if request.job_name else None
        if job is None:
            job = Job(next(self.ids), request.job_name, dataset, request.terms)
            self.restore_job(job)
            self._outcome.changed["job", job.id] = job
        if begin is not None and differ_in_consumers(job.terms, request.terms):
            # All consumers were restarted, and there are more or fewer of them now.
            for iteration in list(job.iterations.values()):
                self._forget(iteration)
            job.terms = request.terms
            self._outcome.changed["job", job.id] = job
        # Compared as text: the pickle of one description may differ between processes.
        if (job.terms, job.dataset.request.summary) != (request.terms, summary):
            raise InvalidArgumentError(
                f"there is a job {job.name!r} with different parameters: existing "
                f"{told(job.terms)} over {job.dataset.request.summary}, new "
                f"{told(request.terms)} over {summary}; give one of them another job_name"
            )
        return job

    def _forget(self, iteration: Iteration) -> None:
        job = iteration.job
        if iteration.finished:
            job.finished.add(iteration.repetition)
        del job.iterations[iteration.repetition], self.iterations[iteration.id]
        self.leases.forget(iteration)
        for client_id in iteration.clients:
            del self.clients[client_id]
            self._outcome.changed["client", client_id] = None
        for part in iteration.parts.values():
            self._outcome.changed["part", part.id] = None
        self._outcome.changed["iteration", iteration.id] = None
        self._outcome.changed["job", job.id] = job
        if not job.name:
            del self.jobs[job.id]
            self._outcome.changed["job", job.id] = None
