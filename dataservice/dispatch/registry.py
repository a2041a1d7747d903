"""What the dispatcher knows, as a pure state machine: no messages, no clock, no threads.

The shell around it gives every method the time, and afterwards carries out and writes down what
:meth:`Registry.take_outcome` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from dataservice.dispatch.homes import Homes
from dataservice.dispatch.jobs import Jobs
from dataservice.dispatch.records import Client, Departure, Outcome, Part, Task, Timeouts, Worker
from dataservice.dispatch.splits import Passes
from dataservice.dispatch.terms import check_index_is_free, told_apart
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from mpidist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError


class Registry(Jobs):
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
        super().__init__(itertools.count(1) if ids is None else ids, Homes(worker_addresses))
        self.timeouts = timeouts

    def take_outcome(self) -> Outcome:
        """Local. What has changed since the last call."""
        self._outcome.removals += self.leases.removals
        self.leases.removals = []
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

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

        A client that asks again, because the answer was lost, is the same.

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
        known = [client for client in self.clients.values() if client.token == request.token]
        if request.token and known:
            known[0].last_seen = now
            return known[0]
        dataset = self.dataset(request.dataset_id)
        local = [w for w in self.workers.values() if w.process == request.process]
        if request.terms.target == pb.LOCAL and not local:
            raise InvalidArgumentError(
                "target_workers='LOCAL' needs a WorkerServer in the consumer's own process, and "
                f"none of the workers of this dispatcher is in {request.process}"
            )
        iteration = self._iteration(request, dataset, seed)
        if told_apart(iteration.job.terms):
            check_index_is_free(iteration, request)
            iteration.joined.add(request.consumer_index)
            self._touch(iteration)
        index, token = request.consumer_index, request.token
        client = Client(next(self.ids), iteration, request.process, index, token, now)
        iteration.clients[client.id] = client
        iteration.left = float("inf")
        self.clients[client.id] = client
        self._outcome.changed["client", client.id] = client
        if not iteration.finished:
            self.leases.take_back(iteration)
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
            self._settled(task, client)
            if reads_along and task.running and not task.lost:
                self._outcome.departures.append(
                    Departure(client.id, task.id, task.worker.address, tuple(task.part.used.bounds))
                )
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

    # Time

    def hear_all(self, now: float) -> None:
        """Local. Count all as heard of, who could not say anything."""
        for worker in self.workers.values():
            worker.last_seen = now
        for client in self.clients.values():
            client.last_seen = now

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
        self.expire_datasets(used, now, self.timeouts.iteration_s)

    # Inside

    def _place_all(self) -> None:
        for iteration in self.iterations.values():
            if iteration.wanted:
                self.leases.place(iteration, self.workers.values())

    def _drop_worker(self, worker: Worker) -> None:
        del self.workers[worker.id]
        self._outcome.changed["worker", worker.id] = None
        for iteration in self.iterations.values():
            # One that comes in its place shall not bring a copy more; it may take part again.
            if iteration.job.terms.policy != pb.OFF and worker.address in iteration.served:
                iteration.served.discard(worker.address)
                self._touch(iteration)
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
                self._settled(task, client)
        if request.settled:
            self.leases.place(iteration, self.workers.values())

    def _settled(self, task: Task, client: Client) -> None:
        """Nothing more is to be said of a lost task by a client."""
        if client.id in task.unsettled:
            task.unsettled.discard(client.id)
            self._touch(task.part)
        self.leases.look(task)

    def _look(self, part: Part) -> None:
        if part.look():
            part.iteration.version += 1
            saved = part.iteration.job.terms.reading == pb.SAVED
            if part.iteration.finished and not (part.iteration.clients or saved):
                self._forget(part.iteration)
