"""What the dispatcher knows, as a pure state machine: no messages, no clock, no threads.

The shell around it gives every method the time, and carries out the :class:`Removal` values that
it returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dataservice.config import ShardingPolicy
from dataservice.records import Dataset, Iteration, Job, Removal, Task, TaskState, Timeouts, Worker
from dataservice.splits import Passes, Splits
from mpidist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError


class Registry:
    """The dispatcher's state.

    Args:
        timeouts: When to give up on those who say nothing.
        ids: Where the ids come from, 0 not among them.
    """

    def __init__(self, timeouts: Timeouts, ids: Iterator[int] | None = None) -> None:
        self._timeouts = timeouts
        self._ids = itertools.count(1) if ids is None else ids
        self._datasets: dict[int, Dataset] = {}
        self._dataset_ids: dict[bytes, int] = {}
        self._workers: dict[int, Worker] = {}
        self._named_jobs: dict[str, Job] = {}
        self._tasks: dict[int, Task] = {}
        self._clients: dict[int, Iteration] = {}

    # Datasets

    def dataset_id(self, digest: bytes) -> int:
        """Local. The id of a dataset; 0 if it is not known."""
        return self._dataset_ids.get(digest, 0)

    def register_dataset(self, digest: bytes, summary: str, source_length: int) -> int:
        """Local. The id of a dataset, new or known."""
        if digest not in self._dataset_ids:
            dataset = Dataset(next(self._ids), summary, source_length)
            self._datasets[dataset.id] = dataset
            self._dataset_ids[digest] = dataset.id
        return self._dataset_ids[digest]

    # Workers

    def register_worker(self, address: str, now: float) -> int:
        """Local. Add a worker, and give it a task in every iteration that goes on.

        A worker of the same address was restarted: what the old one had begun is lost.

        Returns:
            The worker's id.
        """
        for old in [w.id for w in self._workers.values() if w.address == address]:
            self.unregister_worker(old)
        worker = Worker(next(self._ids), address, now)
        self._workers[worker.id] = worker
        for iteration in {id(it): it for it in self._clients.values()}.values():
            if not iteration.finished:
                self._assign(iteration, worker)
        return worker.id

    def heartbeat_worker(self, worker_id: int, task_ids: list[int], now: float) -> list[int]:
        """Local. Hear of a worker.

        Args:
            worker_id: Its id.
            task_ids: The tasks that it holds.
            now: The time.

        Returns:
            Those of the tasks that it shall forget.

        Raises:
            NotFoundError: The worker counts as lost; it must register again.
        """
        if worker_id not in self._workers:
            raise NotFoundError(f"worker {worker_id} is not registered; register again")
        self._workers[worker_id].last_seen = now
        return [task_id for task_id in task_ids if task_id not in self._tasks]

    def unregister_worker(self, worker_id: int) -> None:
        """Local. Forget a worker; what it had begun and not finished is lost."""
        worker = self._workers.pop(worker_id, None)
        for task in list(self._tasks.values()):
            if task.worker is not worker:
                continue
            if task.state is TaskState.ASSIGNED:
                # Nothing had been taken from the source for it.
                del self._tasks[task.id], task.iteration.tasks[task.id]
            elif task.state is TaskState.RUNNING:
                task.state = TaskState.LOST

    @property
    def workers(self) -> list[Worker]:
        """Local. The workers, in the order of their registration."""
        return list(self._workers.values())

    # Consumers

    def join_iteration(
        self,
        dataset_id: int,
        policy: ShardingPolicy,
        job_name: str | None,
        repetition: int,
        seed: int,
        now: float,
    ) -> int:
        """Local. A client of an iteration, which is created if this is its first.

        Args:
            dataset_id: The dataset.
            policy: How to divide it.
            job_name: The name of a job to share; None makes a job of the client's own.
            repetition: Which iteration of the job.
            seed: Randomness for the iteration, if it is created.
            now: The time.

        Returns:
            The client's id.

        Raises:
            InvalidArgumentError: The job exists with other parameters.
            NotFoundError: The dataset is not known.
            FailedPreconditionError: The dataset cannot be split.
        """
        dataset = self._datasets.get(dataset_id)
        if dataset is None:
            raise NotFoundError(f"dataset {dataset_id} is not registered")
        if policy is ShardingPolicy.DYNAMIC and dataset.source_length < 0:
            raise FailedPreconditionError(f"{dataset.summary} cannot be split between workers")
        job = self._job(job_name, dataset, policy)
        iteration = job.iterations.get(repetition)
        if iteration is None:
            splits = Splits(dataset.source_length) if policy is ShardingPolicy.DYNAMIC else None
            iteration = Iteration(job, repetition, seed, splits)
            job.iterations[repetition] = iteration
        if not iteration.finished:
            # Those who came while nobody read have none yet.
            busy = {task.worker.id for task in iteration.tasks.values()}
            for worker in self._workers.values():
                if worker.id not in busy:
                    self._assign(iteration, worker)
        client_id = next(self._ids)
        iteration.clients[client_id] = now
        iteration.left = float("inf")
        self._clients[client_id] = iteration
        return client_id

    def heartbeat_client(self, client_id: int, now: float) -> Iteration:
        """Local. Hear of a client, and give the state of its iteration.

        Raises:
            NotFoundError: The client has been silent for too long, or has left.
        """
        iteration = self._clients.get(client_id)
        if iteration is None:
            raise NotFoundError(
                f"consumer {client_id} is not known: it has left, or has been silent for "
                f"{self._timeouts.client_s:g} s"
            )
        iteration.clients[client_id] = now
        return iteration

    def release_client(self, client_id: int, now: float) -> list[Removal]:
        """Local. A client leaves; nobody else can come to an iteration of its own job.

        Returns:
            Tasks that workers shall forget.
        """
        iteration = self._clients.pop(client_id, None)
        if iteration is None:
            return []
        del iteration.clients[client_id]
        if iteration.clients:
            return []
        iteration.left = now
        if iteration.job.name is None or iteration.finished:
            return self._forget(iteration)
        return []

    # Tasks

    def start_task(self, task_id: int) -> Task:
        """Local. A worker begins a task.

        Raises:
            NotFoundError: The task has been forgotten, or its worker counts as lost.
        """
        task = self._task(task_id)
        if task.state is TaskState.LOST:
            raise NotFoundError(f"task {task_id} is lost: its worker {task.worker.address} is gone")
        if task.state is TaskState.ASSIGNED:
            task.state = TaskState.RUNNING
        return task

    def next_split(self, task_id: int, passes: Passes) -> range:
        """Local. Source indices for a task; empty if the pass has been given out.

        Raises:
            NotFoundError: The task has been forgotten.
        """
        iteration = self._task(task_id).iteration
        assert iteration.splits is not None
        return iteration.splits.next(passes, len(self._workers))

    def finish_task(self, task_id: int) -> list[Removal]:
        """Local. All elements of a task have been given to consumers.

        Returns:
            Tasks that workers shall forget.
        """
        task = self._tasks.get(task_id)
        if task is None:
            return []
        task.state = TaskState.FINISHED
        iteration = task.iteration
        return self._forget(iteration) if iteration.finished and not iteration.clients else []

    # Time

    def expire(self, now: float) -> list[Removal]:
        """Local. Give up on those who have been silent for too long.

        Returns:
            Tasks that workers shall forget.
        """
        removals: list[Removal] = []
        for worker in list(self._workers.values()):
            if now - worker.last_seen > self._timeouts.worker_s:
                self.unregister_worker(worker.id)
        for client_id, iteration in list(self._clients.items()):
            if now - iteration.clients[client_id] > self._timeouts.client_s:
                removals += self.release_client(client_id, now)
        for job in list(self._named_jobs.values()):
            for iteration in list(job.iterations.values()):
                if now - iteration.left > self._timeouts.iteration_s:
                    removals += self._forget(iteration)
        return removals

    # Inside

    def _task(self, task_id: int) -> Task:
        task = self._tasks.get(task_id)
        if task is None:
            raise NotFoundError(f"task {task_id} is not known: its iteration has been forgotten")
        return task

    def _job(self, name: str | None, dataset: Dataset, policy: ShardingPolicy) -> Job:
        if name is None:
            return Job(None, dataset, policy)
        job = self._named_jobs.setdefault(name, Job(name, dataset, policy))
        # Compared as text: the pickle of one description may differ between processes.
        if (job.policy, job.dataset.summary) != (policy, dataset.summary):
            raise InvalidArgumentError(
                f"there is a job {name!r} with different parameters: existing {job.policy.name} "
                f"over {job.dataset.summary}, new {policy.name} over {dataset.summary}; give one "
                "of them another job_name"
            )
        return job

    def _assign(self, iteration: Iteration, worker: Worker) -> None:
        task = Task(next(self._ids), iteration, worker, iteration.tasks_made)
        iteration.tasks_made += 1
        iteration.tasks[task.id] = task
        self._tasks[task.id] = task

    def _forget(self, iteration: Iteration) -> list[Removal]:
        if iteration.finished:
            iteration.job.finished.add(iteration.repetition)
        del iteration.job.iterations[iteration.repetition]
        for task_id in iteration.tasks:
            del self._tasks[task_id]
        return [
            Removal(task.id, task.worker.address)
            for task in iteration.tasks.values()
            if task.worker.id in self._workers
        ]
