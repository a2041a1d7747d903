"""The dispatcher's state, as a pure state machine: no messages, no clock, no threads.

The shell around it gives every method the time. Afterwards it carries out and writes down the
outcome that :meth:`Registry.take_outcome` returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from dataservice.consumption import SNAPSHOT, mode_of
from dataservice.dispatch.records import (
    Client,
    Dataset,
    Iteration,
    Job,
    Outcome,
    Part,
    Task,
    Timeouts,
    Worker,
)
from dataservice.dispatch.scheduler import Scheduler, next_split
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from mpidist.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)


class DatasetTable:
    """The registered datasets, found by id, by name, and without a name by digest.

    The digest is the hash of the pickle. Datasets of equal identity may differ in globals that
    their functions use and in objects, so a dataset is not recognized by its identity: it is sent
    and kept again if its pickle differs.

    Args:
        ids: Source of new ids.
        outcome: Takes the changes.

    Attributes:
        by_id: All datasets, by id.
    """

    def __init__(self, ids: Iterator[int], outcome: Outcome) -> None:
        self._ids = ids
        self._outcome = outcome
        self.by_id: dict[int, Dataset] = {}
        self._by_digest: dict[bytes, Dataset] = {}
        self._by_name: dict[str, Dataset] = {}

    def get(self, dataset_id: int) -> Dataset:
        """Return a dataset; NotFoundError if it is not known."""
        dataset = self.by_id.get(dataset_id)
        if dataset is None:
            raise NotFoundError(f"dataset {dataset_id} is not registered")
        return dataset

    def named(self, name: str) -> Dataset:
        """Return the dataset of a name; NotFoundError if it is not known."""
        dataset = self._by_name.get(name)
        if dataset is None:
            raise NotFoundError(f"no dataset {name!r} is registered at this dispatcher")
        return dataset

    def find(self, request: pb.RegisterDatasetRequest) -> Dataset | None:
        """Return the dataset of a request, if it is known.

        Raises:
            InvalidArgumentError: Its name belongs to a dataset with other elements.
        """
        if not request.name:
            known = self._by_digest.get(request.digest)
            if known is not None and request.spec and not known.request.spec:
                known.request.spec = request.spec
                self._outcome.touch(known)
            if known is not None:
                known.last_used = float("inf")  # until the next check of unused datasets
            return known
        dataset = self._by_name.get(request.name)
        if dataset is not None and dataset.request.spec != request.spec:
            raise InvalidArgumentError(
                f"the dataset {request.name!r} is registered with elements of another structure: "
                f"existing {dataset.request.summary}, new {request.summary}; datasets of the same "
                "ID must have the same structure"
            )
        return dataset

    def register(self, request: pb.RegisterDatasetRequest) -> Dataset:
        """Return the dataset of a request, new or known; raises as :meth:`find`."""
        dataset = self.find(request)
        if dataset is None:
            kept = pb.RegisterDatasetRequest()
            kept.CopyFrom(request)
            kept.ClearField("pickle")
            dataset = Dataset(next(self._ids), kept)
            self.restore(dataset)
            self._outcome.touch(dataset)
        return dataset

    def restore(self, dataset: Dataset) -> None:
        """Add a dataset that is in the journal."""
        self.by_id[dataset.id] = dataset
        self._by_name.setdefault(dataset.name, dataset)
        if not dataset.request.name:
            self._by_digest[dataset.request.digest] = dataset

    def expire(self, used: Collection[int], now: float, limit_s: float) -> None:
        """Forget datasets without a name that no job has used for some time.

        Args:
            used: Ids of the datasets that jobs use now.
            now: The time.
            limit_s: Seconds without use.
        """
        for dataset in list(self.by_id.values()):
            if dataset.id in used or dataset.last_used > now:
                dataset.last_used = now
            elif not dataset.request.name and now - dataset.last_used > limit_s:
                del self.by_id[dataset.id], self._by_digest[dataset.request.digest]
                del self._by_name[dataset.name]
                self._outcome.remove(dataset)


class JobTable:
    """The jobs, and their iterations that go on.

    Args:
        ids: Source of new ids.
        outcome: Takes the changes.

    Attributes:
        by_id: All jobs, by id.
        iterations: The iterations of all jobs, by id.
    """

    def __init__(self, ids: Iterator[int], outcome: Outcome) -> None:
        self._ids = ids
        self._outcome = outcome
        self.by_id: dict[int, Job] = {}
        self._by_name: dict[str, Job] = {}
        self.iterations: dict[int, Iteration] = {}

    def job_of(self, request: pb.IterationRequest, dataset: Dataset) -> Job:
        """Return the job of a request, new or known.

        Raises:
            InvalidArgumentError: The state is of another dataset or kind of job, or the job
                exists with other parameters.
        """
        summary, identity = dataset.request.summary, dataset.request.identity
        resumes = request.HasField("state")
        if resumes and _is_of_other_kind(request.state, identity, request.terms):
            raise InvalidArgumentError(
                f"the state belongs to an iterator over {request.state.summary}, read as "
                f"{mode_of(request.state.terms).describe(request.state.terms)}, not over "
                f"{summary}, read as {mode_of(request.terms).describe(request.terms)}: give "
                "distribute() the dataset and the arguments that it had when the state was saved "
                "(with the same code of functions, constants and arrays), or begin without the "
                "state"
            )
        job = self._by_name.get(request.job_name) if request.job_name else None
        if job is None:
            return self.add_job(request.job_name, dataset, request.terms)
        same = job.terms == request.terms or (
            # All consumers were restarted, and there are more or fewer of them now.
            resumes and job.mode.is_continued_by(job.terms, request.terms)
        )
        # Not by the digest: the pickle of one description may differ between processes.
        known = job.dataset.request
        if not same or known.identity != identity:
            raise InvalidArgumentError(
                f"there is a job {job.name!r} with different parameters: existing "
                f"{_described(job.terms)} over {known.summary}, new "
                f"{_described(request.terms)} over {summary}; make the arguments and the dataset "
                "the same in all consumers (operations, code of functions, constants and arrays), "
                "or give one of them another job_name"
            )
        return job

    def add_job(self, name: str, dataset: Dataset, terms: pb.Terms) -> Job:
        """Add a job; an empty name makes it one consumer's own."""
        job = Job(next(self._ids), name, dataset, terms)
        self.restore_job(job)
        self._outcome.touch(job)
        return job

    def restore_job(self, job: Job) -> None:
        """Add a job that is in the journal."""
        self.by_id[job.id] = job
        if job.name:
            self._by_name[job.name] = job

    def restore_iteration(self, iteration: Iteration) -> None:
        """Add an iteration that is in the journal."""
        iteration.job.iterations[iteration.repetition] = iteration
        self.iterations[iteration.id] = iteration

    def join(self, job: Job, request: pb.IterationRequest) -> Iteration | None:
        """Return the iteration of a request, if it goes on.

        Raises:
            InvalidArgumentError: Only some of its consumers resume from a state.
        """
        iteration = job.iterations.get(request.repetition)
        if iteration is not None and (iteration.begin is not None) != request.HasField("state"):
            raise InvalidArgumentError(
                f"some consumers of the job {job.name!r} resume from a state and others do not: "
                "set the same state in all of them before they read"
            )
        return iteration

    def begin(self, job: Job, request: pb.IterationRequest, seed: int) -> Iteration:
        """Add the iteration of a request.

        Args:
            job: Its job.
            request: The repetition, and the state from which it goes on, if there is one.
            seed: Randomness for an iteration without a state.
        """
        begin = request.state if request.HasField("state") else None
        if begin is not None:
            job.terms = request.terms
            job.finished.discard(request.repetition)
            self._outcome.touch(job)
        next_index = None
        if job.mode.takes_splits(job.terms):
            next_index = begin.next_index if begin is not None else 0
        seed = begin.seed if begin else seed
        iteration = Iteration(next(self._ids), job, request.repetition, seed, begin, next_index)
        self.restore_iteration(iteration)
        self._outcome.touch(iteration)
        return iteration

    def forget(self, iteration: Iteration) -> None:
        """Forget an iteration, and its job if that has no name."""
        job = iteration.job
        if iteration.finished:
            job.finished.add(iteration.repetition)
        del job.iterations[iteration.repetition], self.iterations[iteration.id]
        for part in iteration.parts.values():
            self._outcome.remove(part)
        self._outcome.remove(iteration)
        if job.name:
            self._outcome.touch(job)
        else:
            del self.by_id[job.id]
            self._outcome.remove(job)


class Registry:
    """The dispatcher's state.

    Args:
        timeouts: When to give up silent workers and clients.
        ids: Source of ids, without 0.
        worker_addresses: Those that static sharding counts on.

    Attributes:
        datasets: The datasets.
        jobs: The jobs and their iterations.
        scheduler: The leases of parts by workers.
        workers: The workers, by id.
        clients: The clients, by id.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        ids: Iterator[int] | None = None,
        worker_addresses: Sequence[str] = (),
    ) -> None:
        self.timeouts = timeouts
        self._ids = itertools.count(1) if ids is None else ids
        # Every part of the registry notes its changes here.
        self._outcome = Outcome()
        self.datasets = DatasetTable(self._ids, self._outcome)
        self.jobs = JobTable(self._ids, self._outcome)
        self.scheduler = Scheduler(self._ids, self._outcome, worker_addresses)
        self.workers: dict[int, Worker] = {}
        self.clients: dict[int, Client] = {}

    def take_outcome(self) -> Outcome:
        """Return the changes since the last call."""
        return self._outcome.take()

    # Workers

    def register_worker(
        self, address: str, process: str, tags: Sequence[str], now: float
    ) -> Worker:
        """Add a worker, and give it a task in every iteration that goes on.

        It replaces a worker of the same address, which was restarted.

        Raises:
            InvalidArgumentError: The dispatcher was configured with the addresses of its workers,
                and this is none of them.
        """
        self.scheduler.slots.assign(address, [worker.address for worker in self.workers.values()])
        worker = Worker(next(self._ids), address, process, tuple(tags), now)
        for old in [w for w in self.workers.values() if w.address == address]:
            self._drop_worker(old)
        self.workers[worker.id] = worker
        self._outcome.touch(worker)
        self._place_all()
        return worker

    def heartbeat_worker(self, request: pb.WorkerRequest, now: float) -> list[int]:
        """Note that a worker lives, and its progress.

        Returns:
            The ids of tasks that it holds, and shall forget.

        Raises:
            NotFoundError: The worker counts as lost; it must register again.
        """
        worker = self.workers.get(request.worker_id)
        if worker is None:
            raise NotFoundError(f"worker {request.worker_id} is not registered; register again")
        worker.last_seen = now
        worker.is_known_to_live = True
        worker.work = list(request.work)
        tasks = self.scheduler.tasks
        for progress in request.progress:
            task = tasks.get(progress.task_id)
            if task is not None and progress.checkpoint.index > task.part.checkpoint.index:
                part, checkpoint = task.part, progress.checkpoint
                part.checkpoint.CopyFrom(checkpoint)
                part.granted = part.granted.after(checkpoint.position)
                self._outcome.touch(part)
        for holders in request.holders:
            task = tasks.get(holders.task_id)
            if task is not None:
                # These clients asked once more after they were given up, or the notice of their
                # departure was lost.
                for client_id in set(holders.client_ids) - self.clients.keys():
                    self._announce_departure(client_id, task)
        return [task_id for task_id in request.task_ids if task_id not in tasks]

    def unregister_worker(self, worker_id: int) -> None:
        """Forget a worker. Others get the parts that it had begun."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._drop_worker(worker)
            self._place_all()

    def lose_worker(self, worker_id: int, why: str) -> None:
        """Forget a worker that has failed, and report that if it had unfinished parts."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        tasks = self.scheduler.tasks_of(worker)
        parts = sum(not (task.lost or task.part.finished) for task in tasks)
        self.unregister_worker(worker_id)
        if parts:
            self._outcome.losses.append(
                f"data worker {worker.address} is lost ({why}) with {parts} unfinished part"
                f"{'s' * (parts > 1)}; {len(self.workers)} left"
            )

    def report_unreachable(self, task_id: int, now: float, patience_s: float) -> None:
        """Lease a part anew, because a client cannot reach its worker.

        The worker is lost if it has been silent for longer than ``patience_s``, too.
        """
        task = self.scheduler.tasks.get(task_id)
        if task is None or task.lost:
            return
        if now - task.worker.last_seen > patience_s:
            self.lose_worker(task.worker.id, "silent, and a consumer cannot reach it")
            return
        task.part.avoided = task.worker.id
        self.scheduler.lose(task)
        self._place_all()

    # Tasks

    def start_task(self, task_id: int) -> Task:
        """Note that a worker begins a task; raises as :meth:`Scheduler.get`."""
        task = self.scheduler.get(task_id)
        if not task.running:
            task.running = True
            self._outcome.touch(task.part)
        return task

    def next_split(self, task_id: int, position: int) -> range:
        """Return source indices for a task, from a position of its part on.

        The same position gives the same indices again, also to another worker of the part.

        Raises:
            FailedPreconditionError: The position is not where the indices of the part end.
            NotFoundError: As :meth:`Scheduler.get`.
        """
        part = self.scheduler.get(task_id).part
        iteration = part.iteration
        known = part.granted.at(position)
        if known is not None:
            return known
        if position != part.granted.stop or iteration.next_index is None:
            raise FailedPreconditionError(
                f"source index {position} of task {task_id} is requested out of order: "
                f"{part.granted.stop} have been given out"
            )
        period = iteration.job.dataset.request.source_length
        split = next_split(iteration.next_index, period, len(self.workers))
        if split:
            iteration.next_index = split.stop
            part.granted = part.granted.plus(split)
            self._outcome.touch(part)
            self._outcome.touch(iteration)
        return split

    def finish_task(self, task_id: int, total: int, *, used_up: bool = False) -> None:
        """Set the number of elements of a task's part.

        Args:
            task_id: The task. An unknown one is ignored.
            total: The number.
            used_up: True if consumers have told the worker that all are used. A consumer that died
                may have told the worker alone.
        """
        task = self.scheduler.tasks.get(task_id)
        if task is None:
            return
        part = task.part
        part.total = total
        if used_up:
            part.used.add(0, total)
        # A snapshot's parts have no consumers that use them.
        part.finished |= part.iteration.job.mode.writes_snapshot
        self._outcome.touch(part)
        self._finish_if_used(part)

    # Clients

    def join(self, request: pb.IterationRequest, seed: int, now: float) -> Client:
        """Add a client to an iteration, which is created if this is its first client.

        A client that asks again, because the answer was lost, is the same.

        Args:
            request: The iteration, and the terms of its job.
            seed: Randomness for the iteration, if it is created.
            now: The time.

        Raises:
            AlreadyExistsError: Another consumer reads as this one.
            FailedPreconditionError: The dataset cannot be split.
            InvalidArgumentError: The job exists with other parameters, the state is of another
                dataset or job, or the consumer has no worker in its process.
            NotFoundError: The dataset is not known.
        """
        known = [client for client in self.clients.values() if client.token == request.token]
        if request.token and known:
            known[0].last_seen = now
            return known[0]
        dataset = self.datasets.get(request.dataset_id)
        local = [w for w in self.workers.values() if w.process == request.process]
        if request.terms.target == pb.LOCAL and not local:
            raise InvalidArgumentError(
                "target_workers='LOCAL' needs a WorkerServer in the consumer's own process, "
                f"but no worker of this dispatcher runs in {request.process}"
            )
        iteration = self._iteration_of(request, dataset, seed)
        if iteration.job.mode.has_consumer_index:
            self._replace_dead(iteration, request.consumer_index, now)
            _check_index_is_free(iteration, request.consumer_index)
            iteration.joined.add(request.consumer_index)
            self._outcome.touch(iteration)
        index, token = request.consumer_index, request.token
        client = Client(next(self._ids), iteration, request.process, index, token, now)
        iteration.clients[client.id] = client
        iteration.left = float("inf")
        self.clients[client.id] = client
        self._outcome.touch(client)
        if not iteration.finished:
            self.scheduler.free_unreadable(iteration)
            self.scheduler.place(iteration, self.workers.values())
        return client

    def heartbeat_client(self, request: pb.ClientRequest, now: float) -> Client:
        """Note that a client lives, and the elements that it has used.

        Raises:
            NotFoundError: The client has been silent for too long, or has left.
        """
        client = self.clients.get(request.client_id)
        if client is None:
            raise self.unknown_client(request.client_id)
        client.last_seen = client.heard = now
        client.away = False
        client.at_end_since = now if request.at_end else None
        client.dismissed &= request.at_end
        if request.HasField("work"):
            client.work = request.work
        self._take_report(client, request)
        return client

    def lose_clients(self, peer: str) -> None:
        """Note that the process of some clients seems to be gone; it may come back."""
        for client in self.clients.values():
            client.away |= client.peer == peer

    def unknown_client(self, client_id: int) -> NotFoundError:
        """Return the error for a client that is not known."""
        return NotFoundError(
            f"consumer {client_id} is not known: it has left, or has been silent for "
            f"{self.timeouts.client_s:g} s (or gone, as others waited for it), or others have "
            "taken its job back to a state, or the dispatcher was started anew without its journal "
            "(work_dir, fault_tolerant_mode)"
        )

    def release_client(self, request: pb.ClientRequest, now: float) -> None:
        """Remove a client that leaves, and the iteration if no other client can join it."""
        client = self.clients.get(request.client_id)
        if client is None:
            return
        self._take_report(client, request)
        iteration = client.iteration
        del self.clients[client.id], iteration.clients[client.id]
        self._outcome.remove(client)
        for part in iteration.parts.values():
            if part.held.pop(client.id, None) is not None:
                self._outcome.touch(part)
        # Its buffered elements come to the others, unless those name the elements they want.
        mode = iteration.job.mode
        for task in iteration.tasks:
            self.scheduler.acknowledge_loss(task, client)
            if not mode.seeks:
                self._announce_departure(client.id, task)
        if iteration.clients:
            iteration.version += not mode.seeks  # there may be something for the others
            self.scheduler.free_unreadable(iteration)
            self.scheduler.place(iteration, self.workers.values())
            return
        iteration.left = now
        if not iteration.job.name or iteration.finished:
            self._forget(iteration)

    # Snapshots

    def save(self, dataset_id: int, path: str, num_streams: int, seed: int) -> Iteration:
        """Have workers save a dataset, in as many parts as there are streams.

        Raises:
            NotFoundError: The dataset is not known.
        """
        terms = pb.Terms(consumption=SNAPSHOT.number, num_shards=num_streams, path=path)
        job = self.jobs.add_job("", self.datasets.get(dataset_id), terms)
        iteration = self.jobs.begin(job, pb.IterationRequest(), seed)
        self.scheduler.make_parts(iteration)
        self.scheduler.place(iteration, self.workers.values())
        return iteration

    def fail_save(self, task_id: int, code: int, message: str) -> None:
        """Note that a worker cannot save its part."""
        task = self.scheduler.tasks.get(task_id)
        if task is not None and task.part.iteration.job.mode.writes_snapshot:
            task.part.iteration.failure = code, message
            self._outcome.touch(task.part.iteration)

    def ended_saves(self) -> list[Iteration]:
        """List the saves that workers have finished, or failed."""
        return [
            iteration
            for iteration in self.jobs.iterations.values()
            if iteration.job.mode.writes_snapshot and (iteration.finished or iteration.failure[0])
        ]

    def end_save(self, iteration: Iteration) -> None:
        """Forget a save after its end is on the disk."""
        if iteration.id in self.jobs.iterations:
            self._forget(iteration)

    def tasks_to_begin(self, worker_id: int, most_saves: int) -> list[int]:
        """Return the ids of tasks that a worker has not begun, and of the saves that it shall run.

        Args:
            worker_id: The worker.
            most_saves: How many parts of saves it runs at a time.
        """
        served: list[int] = []
        saves: list[Task] = []
        for task in self.scheduler.tasks.values():
            if task.worker.id != worker_id or task.lost or task.part.finished:
                continue
            if not task.part.iteration.job.mode.writes_snapshot:
                served += [] if task.running else [task.id]
            elif task.part.iteration.wanted:
                saves.append(task)
        saves.sort(key=lambda task: (not task.running, task.id))  # tasks that have begun go on
        return served + [task.id for task in saves[:most_saves]]

    # Time

    def hear_all(self, now: float) -> None:
        """Count all workers and clients as heard of, because none could say anything."""
        for worker in self.workers.values():
            worker.last_seen = now
        for client in self.clients.values():
            client.last_seen = now

    def expire(self, now: float) -> None:
        """Give up workers and clients that have been silent for too long."""
        for worker in list(self.workers.values()):
            if now - worker.last_seen > self.timeouts.worker_s:
                self.lose_worker(worker.id, f"silent for {self.timeouts.worker_s:g} s")
        for client in list(self.clients.values()):
            missed = client.is_away(now) and client.is_waited_for
            if missed or now - client.last_seen > self.timeouts.client_s:
                self._give_up(client, now)
        for iteration in list(self.jobs.iterations.values()):
            if now - iteration.left > self.timeouts.iteration_s:
                self._forget(iteration)
        used = {job.dataset.id for job in self.jobs.by_id.values()}
        self.datasets.expire(used, now, self.timeouts.iteration_s)

    # Inside

    def _iteration_of(self, request: pb.IterationRequest, dataset: Dataset, seed: int) -> Iteration:
        if request.terms.policy == pb.DYNAMIC and dataset.request.source_length < 0:
            raise FailedPreconditionError(
                f"{dataset.request.summary} cannot be split between workers"
            )
        self.scheduler.check_terms(request.terms)
        job = self.jobs.job_of(request, dataset)
        for iteration in _taken_back(job, request):
            self._forget(iteration)
        joined = self.jobs.join(job, request)
        if joined is not None:
            return joined
        iteration = self.jobs.begin(job, request, seed)
        self.scheduler.make_parts(iteration)
        return iteration

    def _forget(self, iteration: Iteration) -> None:
        self.scheduler.forget(iteration)
        for client in iteration.clients.values():
            del self.clients[client.id]
            self._outcome.remove(client)
        self.jobs.forget(iteration)

    def _place_all(self) -> None:
        for iteration in self.jobs.iterations.values():
            if iteration.wanted:
                self.scheduler.place(iteration, self.workers.values())

    def _drop_worker(self, worker: Worker) -> None:
        del self.workers[worker.id]
        self._outcome.remove(worker)
        for iteration in self.jobs.iterations.values():
            # A worker that comes in its place shall not bring another copy under OFF. Under the
            # other policies it may take part again.
            if iteration.job.terms.policy != pb.OFF and worker.address in iteration.served:
                iteration.served.discard(worker.address)
                self._outcome.touch(iteration)
        for task in self.scheduler.tasks_of(worker):
            if not task.lost:
                self.scheduler.lose(task)

    def _give_up(self, client: Client, now: float) -> None:
        iteration = client.iteration
        if not (iteration.finished or client.dismissed):
            job = f"job {iteration.job.name!r}" if iteration.job.name else "a job without a name"
            self._outcome.losses.append(
                f"a consumer of {job}, in process {client.process}, is given up: nothing was heard "
                f"of it for {now - client.last_seen:.3g} s"
            )
        self.release_client(pb.ClientRequest(client_id=client.id), now)

    def _replace_dead(self, iteration: Iteration, index: int, now: float) -> None:
        """Release a client that was killed, if another one comes in its place."""
        for client in list(iteration.clients.values()):
            if client.index == index and iteration.job.name and client.is_away(now):
                self.release_client(pb.ClientRequest(client_id=client.id), now)

    def _announce_departure(self, client_id: int, task: Task) -> None:
        if task.running and not task.lost:
            self._outcome.update_of(task.worker).departures.add(
                client_id=client_id, task_id=task.id, used=task.part.used.bounds
            )

    def _take_report(self, client: Client, request: pb.ClientRequest) -> None:
        iteration = client.iteration
        for ranges in request.used:
            part = iteration.parts[ranges.part]
            if not ranges.bounds:
                continue
            if iteration.job.mode.is_first_come:
                part.used.update(RangeSet(ranges.bounds))
            else:
                consumers = iteration.job.terms.num_consumers
                part.advance_watermark(client.index, ranges.bounds[-1], consumers)
            self._outcome.touch(part)
            self._finish_if_used(part)
        for ranges in request.held:
            part = iteration.parts[ranges.part]
            part.held.setdefault(client.id, RangeSet()).update(RangeSet(ranges.bounds))
            self._outcome.touch(part)
        for task_id in request.settled:
            task = self.scheduler.tasks.get(task_id)
            if task is not None and task.lost:
                self.scheduler.acknowledge_loss(task, client)
        if request.settled:
            self.scheduler.place(iteration, self.workers.values())

    def _finish_if_used(self, part: Part) -> None:
        iteration = part.iteration
        if part.finish_if_used():
            iteration.version += 1
            if iteration.finished and not (iteration.clients or iteration.job.mode.writes_snapshot):
                self._forget(iteration)


def _taken_back(job: Job, request: pb.IterationRequest) -> list[Iteration]:
    """List the iterations that end because consumers return with an earlier state."""
    if not request.HasField("state"):
        return []
    if job.terms != request.terms:  # for another number of consumers
        return list(job.iterations.values())
    iteration = job.iterations.get(request.repetition)
    if iteration is None:
        return []
    begin = iteration.begin
    is_other = begin is None or begin.position != request.state.position
    rejoins = job.mode.has_consumer_index and request.consumer_index in iteration.joined
    return [iteration] if is_other or rejoins else []


def _check_index_is_free(iteration: Iteration, index: int) -> None:
    """Raise AlreadyExistsError if another consumer reads with this index."""
    for other in iteration.clients.values():
        if other.index == index:
            raise AlreadyExistsError(
                f"consumer {index} of the job {iteration.job.name!r} is already reading, in "
                f"{other.process}"
            )


def _described(terms: pb.Terms) -> str:
    """Describe in words the terms that are not the default."""
    words = [pb.ShardingPolicy.Name(terms.policy)]
    if not mode_of(terms).is_default:
        words.append(f"consumption {mode_of(terms).name}")
    for name, kind in (("delivery", pb.Delivery), ("target", pb.Target)):
        if getattr(terms, name):
            words.append(f"{name} {kind.Name(getattr(terms, name))}")
    numbers = ("num_shards", "num_consumers")
    words += [f"{name} {getattr(terms, name)}" for name in numbers if getattr(terms, name)]
    return ", ".join(words)


def _is_of_other_kind(begin: pb.State, identity: bytes, terms: pb.Terms) -> bool:
    """Return whether an iteration with these terms cannot begin from a state."""
    mode = mode_of(terms)
    if begin.identity != identity or mode_of(begin.terms) is not mode:
        return True
    return any(getattr(begin.terms, name) != getattr(terms, name) for name in mode.fixed_terms)
