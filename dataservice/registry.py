"""What the dispatcher knows, as a pure state machine: no messages, no clock, no threads.

The shell around it gives every method the time, and afterwards carries out and writes down what
:attr:`Registry.outcome` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataservice.homes import Homes
from dataservice.leases import Leases, by_worker
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from dataservice.records import (
    Client,
    Dataset,
    Departure,
    Iteration,
    Job,
    Part,
    Removal,
    Task,
    Timeouts,
    Worker,
)
from dataservice.splits import Cursors, Passes
from mpidist.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)

Key = tuple[str, int]

# What is worth a word where two jobs differ.
_SPECIAL = (pb.ORDERED, pb.ROUNDS, pb.CACHED)


@dataclass
class Outcome:
    """What has changed since it was last taken.

    Attributes:
        changed: Records by kind and id; None if they are gone.
        removals: Tasks that workers shall forget.
        departures: Clients that workers shall forget.
    """

    changed: dict[Key, Any] = field(default_factory=dict)
    removals: list[Removal] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)


class Registry:
    """The dispatcher's state.

    Args:
        timeouts: When to give up on those who say nothing.
        ids: Where the ids come from, 0 not among them.
        worker_addresses: Those that static sharding counts on.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        ids: Iterator[int] | None = None,
        worker_addresses: Sequence[str] = (),
    ) -> None:
        self.timeouts = timeouts
        self.ids = itertools.count(1) if ids is None else ids
        self.homes = Homes(worker_addresses)
        self.datasets: dict[int, Dataset] = {}
        self._by_digest: dict[bytes, Dataset] = {}
        self._by_name: dict[str, Dataset] = {}
        self.workers: dict[int, Worker] = {}
        self.jobs: dict[int, Job] = {}
        self._by_job_name: dict[str, Job] = {}
        self.iterations: dict[int, Iteration] = {}
        self.clients: dict[int, Client] = {}
        self._outcome = Outcome()
        self.leases = Leases(self.ids, self.homes, self._touch)

    def take_outcome(self) -> Outcome:
        """Local. What has changed since the last call."""
        self._outcome.removals += self.leases.removals
        self.leases.removals = []
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    # Datasets

    def dataset(self, dataset_id: int) -> Dataset:
        """Local. A dataset; NotFoundError if it is not known."""
        dataset = self.datasets.get(dataset_id)
        if dataset is None:
            raise NotFoundError(f"dataset {dataset_id} is not registered")
        return dataset

    def dataset_named(self, name: str) -> Dataset:
        """Local. A dataset; NotFoundError if it is not known."""
        dataset = self._by_name.get(name)
        if dataset is None:
            raise NotFoundError(f"no dataset {name!r} is registered at this dispatcher")
        return dataset

    def find_dataset(self, request: pb.RegisterDatasetRequest) -> Dataset | None:
        """Local. The dataset that a request is about, if it is known.

        Raises:
            InvalidArgumentError: Its name belongs to a dataset with other elements.
        """
        if not request.name:
            known = self._by_digest.get(request.digest)
            if known is not None:
                known.last_used = float("inf")  # until the next look at the time
            return known
        dataset = self._by_name.get(request.name)
        if dataset is not None and dataset.request.spec != request.spec:
            raise InvalidArgumentError(
                f"the dataset {request.name!r} is registered with elements of another structure: "
                f"existing {dataset.request.summary}, new {request.summary}; datasets of the same "
                "ID must have the same structure"
            )
        return dataset

    def register_dataset(self, request: pb.RegisterDatasetRequest) -> Dataset:
        """Local. A dataset, new or known; raises as :meth:`find_dataset`."""
        dataset = self.find_dataset(request)
        if dataset is None:
            kept = pb.RegisterDatasetRequest()
            kept.CopyFrom(request)
            kept.ClearField("pickle")
            dataset = Dataset(next(self.ids), kept)
            self.restore_dataset(dataset)
            self._outcome.changed["dataset", dataset.id] = dataset
        return dataset

    def restore_dataset(self, dataset: Dataset) -> None:
        """Local. Add a dataset as it is."""
        self.datasets[dataset.id] = dataset
        self._by_name.setdefault(dataset.name, dataset)
        if not dataset.request.name:
            self._by_digest[dataset.request.digest] = dataset

    # Workers

    def register_worker(
        self, address: str, process: str, tags: Sequence[str], now: float
    ) -> Worker:
        """Local. Add a worker, and give it a task in every iteration that goes on.

        A worker of the same address was restarted: it comes in its place.

        Raises:
            InvalidArgumentError: The dispatcher was configured with the addresses of its workers,
                and this is none of them.
        """
        self.homes.admit(address, [worker.address for worker in self.workers.values()])
        worker = Worker(next(self.ids), address, process, tuple(tags), now)
        for old in [w for w in self.workers.values() if w.address == address]:
            for iteration in self.iterations.values():
                if old.id in iteration.served:
                    iteration.served.add(worker.id)
                    self._touch(iteration)
            self._drop_worker(old)
        self.workers[worker.id] = worker
        self._outcome.changed["worker", worker.id] = worker
        self._place_all()
        return worker

    def heartbeat_worker(self, request: pb.WorkerRequest, now: float) -> list[int]:
        """Local. Hear of a worker.

        Returns:
            The ids of tasks that it holds, and shall forget.

        Raises:
            NotFoundError: The worker counts as lost; it must register again.
        """
        worker = self.workers.get(request.worker_id)
        if worker is None:
            raise NotFoundError(f"worker {request.worker_id} is not registered; register again")
        worker.last_seen = now
        worker.work = list(request.work)
        for progress in request.progress:
            task = self.leases.tasks.get(progress.task_id)
            if task is not None and progress.checkpoint.index > task.part.checkpoint.index:
                part, checkpoint = task.part, progress.checkpoint
                part.checkpoint.CopyFrom(checkpoint)
                part.granted = part.granted.after(tuple(checkpoint.passes), checkpoint.split)
                self._touch(part)
        return [task_id for task_id in request.task_ids if task_id not in self.leases.tasks]

    def unregister_worker(self, worker_id: int) -> None:
        """Local. Forget a worker; others get what it had begun."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._drop_worker(worker)
            self._place_all()

    def report_unreachable(self, task_id: int, now: float, patience_s: float) -> None:
        """Local. A client cannot reach a task: another worker, or the same one anew, gets its part.

        A worker that is silent, too, is lost.
        """
        task = self.leases.tasks.get(task_id)
        if task is None or task.lost:
            return
        if now - task.worker.last_seen > patience_s:
            self.unregister_worker(task.worker.id)
            return
        task.part.avoided = task.worker.id
        self.leases.lose(task)
        self._place_all()

    # Clients

    def join(self, request: pb.IterationRequest, seed: int, now: float) -> Client:
        """Local. A client of an iteration, which is created if this is its first.

        Args:
            request: Which iteration, and what the job is like.
            seed: Randomness for the iteration, if it is created.
            now: The time.

        Raises:
            AlreadyExistsError: Another consumer reads as this one.
            FailedPreconditionError: The dataset cannot be split.
            InvalidArgumentError: The job exists with other parameters, the state is of another
                dataset or job, or the consumer has no worker in its process.
            NotFoundError: The dataset is not known.
        """
        dataset = self.dataset(request.dataset_id)
        local = [w for w in self.workers.values() if w.process == request.process]
        if request.terms.target == pb.LOCAL and not local:
            raise InvalidArgumentError(
                "target_workers='LOCAL' needs a WorkerServer in the consumer's own process, and "
                f"none of the workers of this dispatcher is in {request.process}"
            )
        iteration = self._iteration(request, dataset, seed)
        if _told_apart(iteration.job):
            _check_index_is_free(iteration, request)
            iteration.joined.add(request.consumer_index)
            self._touch(iteration)
        client = Client(next(self.ids), iteration, request.process, request.consumer_index, now)
        iteration.clients[client.id] = client
        iteration.left = float("inf")
        self.clients[client.id] = client
        self._outcome.changed["client", client.id] = client
        if not iteration.finished:
            self.leases.place(iteration, self.workers.values())
        return client

    def heartbeat_client(self, request: pb.ClientRequest, now: float) -> Client:
        """Local. Hear of a client, and of what it has used.

        Raises:
            NotFoundError: The client has been silent for too long, or has left.
        """
        client = self.clients.get(request.client_id)
        if client is None:
            raise self.unknown_client(request.client_id)
        client.last_seen = now
        if request.HasField("work"):
            client.work = request.work
        self._take_report(client, request)
        return client

    def unknown_client(self, client_id: int) -> NotFoundError:
        """Local. What a client hears that is none."""
        return NotFoundError(
            f"consumer {client_id} is not known: it has left, or has been silent for "
            f"{self.timeouts.client_s:g} s, or others have taken its job back to a state"
        )

    def release_client(self, request: pb.ClientRequest, now: float) -> None:
        """Local. A client leaves; nobody else can come to an iteration of its own job."""
        client = self.clients.get(request.client_id)
        if client is None:
            return
        self._take_report(client, request)
        iteration = client.iteration
        del self.clients[client.id], iteration.clients[client.id]
        self._outcome.changed["client", client.id] = None
        for part in iteration.parts.values():
            if part.held.pop(client.id, None) is not None:
                self._touch(part)
        reads_along = iteration.job.terms.reading in (pb.SHARED, pb.CACHED)
        for task in iteration.tasks:
            task.unsettled.discard(client.id)
            if reads_along and task.running and not task.lost:
                self._outcome.departures.append(
                    Departure(client.id, task.id, task.worker.address, tuple(task.part.used.bounds))
                )
            self.leases.look(task)
        if iteration.clients:
            self.leases.take_back(iteration)
            self.leases.place(iteration, self.workers.values())
            return
        iteration.left = now
        if not iteration.job.name or iteration.finished:
            self._forget(iteration)

    # Tasks

    def start_task(self, task_id: int) -> Task:
        """Local. A worker begins a task; raises as :meth:`Leases.get`."""
        task = self.leases.get(task_id)
        if not task.running:
            task.running = True
            self._touch(task.part)
        return task

    def next_split(self, task_id: int, passes: Passes, number: int) -> range:
        """Local. Source indices for a task; empty if the pass has been given out.

        The same number gives the same split again, also to another worker of the part.

        Raises:
            FailedPreconditionError: A split is asked for before its turn, or after it.
            NotFoundError: As :meth:`Leases.get`.
        """
        part = self.leases.get(task_id).part
        iteration = part.iteration
        known = part.granted.get(passes, number)
        if known is not None:
            return known
        if number != part.granted.count(passes) or iteration.cursors is None:
            raise FailedPreconditionError(
                f"split {number} of pass {passes} of task {task_id} is not to be had: "
                f"{part.granted.count(passes)} have been given"
            )
        split = iteration.cursors.next(passes, len(self.workers))
        if split:
            part.granted.add(passes, split)
            self._touch(part)
            self._touch(iteration)
        return split

    def finish_task(self, task_id: int, total: int) -> None:
        """Local. The number of elements of a task's part is known."""
        task = self.leases.tasks.get(task_id)
        if task is None:
            return
        part = task.part
        part.total = total
        # What is saved has no consumers to use it.
        part.finished |= part.iteration.job.terms.reading == pb.SAVED
        self._touch(part)
        self._look(part)

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

    def saves_of(self, worker_id: int) -> list[int]:
        """Local. The ids of tasks that a worker shall run unasked."""
        return [
            task.id
            for task in self.leases.tasks.values()
            if task.worker.id == worker_id
            and task.part.iteration.job.terms.reading == pb.SAVED
            and task.part.iteration.wanted
            and not task.part.finished
        ]

    # Time

    def expire(self, now: float) -> None:
        """Local. Give up on those who have been silent for too long."""
        for worker in list(self.workers.values()):
            if now - worker.last_seen > self.timeouts.worker_s:
                self.unregister_worker(worker.id)
        for client in list(self.clients.values()):
            if now - client.last_seen > self.timeouts.client_s:
                self.release_client(pb.ClientRequest(client_id=client.id), now)
        for iteration in list(self.iterations.values()):
            if now - iteration.left > self.timeouts.iteration_s:
                self._forget(iteration)
        used = {job.dataset.id for job in self.jobs.values()}
        for dataset in list(self.datasets.values()):
            if dataset.id in used or dataset.last_used > now:
                dataset.last_used = now
            elif not dataset.request.name and now - dataset.last_used > self.timeouts.iteration_s:
                del self.datasets[dataset.id], self._by_digest[dataset.request.digest]
                del self._by_name[dataset.name]
                self._outcome.changed["dataset", dataset.id] = None

    # Inside

    def _touch(self, what: Part | Iteration) -> None:
        kind = "part" if isinstance(what, Part) else "iteration"
        self._outcome.changed[kind, what.id] = what

    def _place_all(self) -> None:
        for iteration in self.iterations.values():
            if iteration.wanted:
                self.leases.place(iteration, self.workers.values())

    def _drop_worker(self, worker: Worker) -> None:
        del self.workers[worker.id]
        self._outcome.changed["worker", worker.id] = None
        for task in list(self.leases.tasks.values()):
            if task.worker is worker and not task.lost:
                self.leases.lose(task)
                self._touch(task.part.iteration)

    def _take_report(self, client: Client, request: pb.ClientRequest) -> None:
        iteration = client.iteration
        for ranges in request.used:
            part = iteration.parts[ranges.part]
            if not ranges.bounds:
                continue
            if iteration.job.shared:
                part.used.update(RangeSet(ranges.bounds))
            else:
                consumers = iteration.job.terms.num_consumers
                part.note_mark(client.index, ranges.bounds[-1], consumers)
            self._touch(part)
            self._look(part)
        for ranges in request.held:
            part = iteration.parts[ranges.part]
            part.held.setdefault(client.id, RangeSet()).update(RangeSet(ranges.bounds))
            self._touch(part)
        for task_id in request.settled:
            task = self.leases.tasks.get(task_id)
            if task is not None and task.lost:
                task.unsettled.discard(client.id)
                self.leases.look(task)
        if request.settled:
            self.leases.place(iteration, self.workers.values())

    def _look(self, part: Part) -> None:
        if part.look():
            part.iteration.version += 1
            saved = part.iteration.job.terms.reading == pb.SAVED
            if part.iteration.finished and not (part.iteration.clients or saved):
                self._forget(part.iteration)

    def _iteration(self, request: pb.IterationRequest, dataset: Dataset, seed: int) -> Iteration:
        splits = request.terms.policy == pb.DYNAMIC
        if splits and dataset.request.source_length < 0:
            raise FailedPreconditionError(
                f"{dataset.request.summary} cannot be split between workers"
            )
        if by_worker(request.terms) and not len(self.homes):
            raise NotFoundError(
                f"ShardingPolicy.{pb.ShardingPolicy.Name(request.terms.policy)} gives each data "
                "worker a part of its own, and the dispatcher does not know the workers; give it "
                "DispatcherConfig(worker_addresses=...)"
            )
        begin = request.state if request.HasField("state") else None
        job = self._job(request, dataset, begin)
        iteration = job.iterations.get(request.repetition)
        if iteration is not None and begin is not None and _is_behind(iteration, request):
            # Consumers that were restarted take the job back to where they are.
            self._forget(iteration)
            iteration = None
        if begin is not None and iteration is None:
            job.finished.discard(request.repetition)
            self._outcome.changed["job", job.id] = job
        if iteration is not None:
            _check_same_begin(iteration, begin)
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
        if begin is not None and _other_kind(begin, summary, request.terms):
            raise InvalidArgumentError(
                f"this is the state of an iterator over {begin.summary}, read as "
                f"{_read_as(begin.terms)}, not over {summary}, read as {_read_as(request.terms)}"
            )
        job = self._by_job_name.get(request.job_name) if request.job_name else None
        if job is None:
            job = Job(next(self.ids), request.job_name, dataset, request.terms)
            self.restore_job(job)
            self._outcome.changed["job", job.id] = job
        if begin is not None and _differ_in_consumers(job.terms, request.terms):
            # All consumers were restarted, and there are more or fewer of them now.
            for iteration in list(job.iterations.values()):
                self._forget(iteration)
            job.terms = request.terms
            self._outcome.changed["job", job.id] = job
        # Compared as text: the pickle of one description may differ between processes.
        if (job.terms, job.dataset.request.summary) != (request.terms, summary):
            raise InvalidArgumentError(
                f"there is a job {job.name!r} with different parameters: existing "
                f"{_told(job.terms)} over {job.dataset.request.summary}, new "
                f"{_told(request.terms)} over {summary}; give one of them another job_name"
            )
        return job

    def restore_job(self, job: Job) -> None:
        """Local. Add a job as it is."""
        self.jobs[job.id] = job
        if job.name:
            self._by_job_name[job.name] = job

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


def _told(terms: pb.Terms) -> str:
    """Terms in words: those that are not the default."""
    words = [pb.ShardingPolicy.Name(terms.policy)]
    if terms.reading in _SPECIAL:
        words.append(f"reading {pb.Reading.Name(terms.reading)}")
    for name, kind in (("delivery", pb.Delivery), ("target", pb.Target)):
        if getattr(terms, name):
            words.append(f"{name} {kind.Name(getattr(terms, name))}")
    numbers = ("num_shards", "num_consumers")
    words += [f"{name} {getattr(terms, name)}" for name in numbers if getattr(terms, name)]
    return ", ".join(words)


def _other_kind(begin: pb.State, summary: str, terms: pb.Terms) -> bool:
    """Whether a state cannot be where an iteration with such terms begins."""
    theirs = begin.terms
    if (begin.summary, theirs.reading) != (summary, terms.reading):
        return True
    if terms.reading == pb.ROUNDS and theirs.num_consumers != terms.num_consumers:
        return True
    return _told_apart_by(terms) and theirs.num_shards != terms.num_shards


def _read_as(terms: pb.Terms) -> str:
    """How elements come to consumers, in words."""
    name = pb.Reading.Name(terms.reading)
    if _told_apart_by(terms):
        name += f" by {terms.num_consumers} consumers from {terms.num_shards} parts"
    return name


def _told_apart_by(terms: pb.Terms) -> bool:
    return terms.reading in (pb.ORDERED, pb.ROUNDS)


def _differ_in_consumers(terms: pb.Terms, other: pb.Terms) -> bool:
    """Whether two terms are of one order that is dealt out to different numbers of consumers."""
    same = pb.Terms()
    same.CopyFrom(terms)
    same.num_consumers = other.num_consumers
    return terms.reading == pb.ORDERED and terms != other and same == other


def _told_apart(job: Job) -> bool:
    return _told_apart_by(job.terms)


def _is_behind(iteration: Iteration, request: pb.IterationRequest) -> bool:
    """Whether a request that brings a state means another run of an iteration that exists."""
    begin = iteration.begin
    if begin is None or begin.position != request.state.position:
        return True
    return _told_apart(iteration.job) and request.consumer_index in iteration.joined


def _check_index_is_free(iteration: Iteration, request: pb.IterationRequest) -> None:
    for other in iteration.clients.values():
        if other.index == request.consumer_index:
            raise AlreadyExistsError(
                f"consumer {request.consumer_index} of the job {iteration.job.name!r} reads "
                f"already, in {other.process}"
            )


def _check_same_begin(iteration: Iteration, begin: pb.State | None) -> None:
    if (iteration.begin is None) != (begin is None):
        raise InvalidArgumentError(
            f"some consumers of the job {iteration.job.name!r} go on from a state and others do "
            "not: set the same state in all of them, before they read"
        )
