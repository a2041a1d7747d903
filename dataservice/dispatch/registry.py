"""What the dispatcher knows, as a pure state machine: no messages, no clock, no threads.

The shell around it gives every method the time, and afterwards carries out and writes down what
:meth:`Registry.take_outcome` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from dataservice.dispatch.clients import Clients
from dataservice.dispatch.endings import is_away, is_waited_for
from dataservice.dispatch.homes import Homes
from dataservice.dispatch.records import Client, Outcome, Task, Timeouts, Worker
from dataservice.dispatch.splits import Passes
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import FailedPreconditionError, NotFoundError


class Registry(Clients):
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
        super().__init__(
            timeouts, itertools.count(1) if ids is None else ids, Homes(worker_addresses)
        )

    def take_outcome(self) -> Outcome:
        """Local. What has changed since the last call."""
        self._outcome.removals += self.leases.removals
        self._outcome.leased += self.leases.leased
        self.leases.removals, self.leases.leased = [], []
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
        worker.is_known_to_live = True
        worker.work = list(request.work)
        for progress in request.progress:
            task = self.leases.tasks.get(progress.task_id)
            if task is not None and progress.checkpoint.index > task.part.checkpoint.index:
                part, checkpoint = task.part, progress.checkpoint
                part.checkpoint.CopyFrom(checkpoint)
                part.granted = part.granted.after(tuple(checkpoint.passes), checkpoint.split)
                self._touch(part)
        for holders in request.holders:
            task = self.leases.tasks.get(holders.task_id)
            if task is not None:
                # They asked once more after they were given up, or word of that was lost.
                for client_id in set(holders.client_ids) - self.clients.keys():
                    self._depart(client_id, task)
        return [task_id for task_id in request.task_ids if task_id not in self.leases.tasks]

    def unregister_worker(self, worker_id: int) -> None:
        """Local. Forget a worker; others get what it had begun."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            self._drop_worker(worker)
            self._place_all()

    def lose_worker(self, worker_id: int, why: str) -> None:
        """Local. A worker is gone without a word: that is told if it was at work."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return
        tasks = [task for task in self.leases.tasks.values() if task.worker is worker]
        parts = sum(not (task.lost or task.part.finished) for task in tasks)
        self.unregister_worker(worker_id)
        if parts:
            self._outcome.losses.append(
                f"data worker {worker.address} is lost ({why}) with {parts} unfinished part"
                f"{'s' * (parts > 1)}; {len(self.workers)} left"
            )

    def report_unreachable(self, task_id: int, now: float, patience_s: float) -> None:
        """Local. A client cannot reach a task: another worker, or the same one anew, gets its part.

        A worker that is silent, too, is lost.
        """
        task = self.leases.tasks.get(task_id)
        if task is None or task.lost:
            return
        if now - task.worker.last_seen > patience_s:
            self.lose_worker(task.worker.id, "silent, and a consumer cannot reach it")
            return
        task.part.avoided = task.worker.id
        self.leases.lose(task)
        self._place_all()

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
                f"split {number} of pass {passes} of task {task_id} is requested out of order: "
                f"{part.granted.count(passes)} have been given out"
            )
        split = iteration.cursors.next(passes, len(self.workers))
        if split:
            part.granted.add(passes, split)
            self._touch(part)
            self._touch(iteration)
        return split

    def finish_task(self, task_id: int, total: int, *, used_up: bool = False) -> None:
        """Local. The number of elements of a task's part is known.

        Args:
            task_id: The task; one that is not known is left alone.
            total: The number.
            used_up: Whether all have been used, for all that the worker has been told: a consumer
                that died may have told the worker alone.
        """
        task = self.leases.tasks.get(task_id)
        if task is None:
            return
        part = task.part
        part.total = total
        if used_up:
            part.used.add(0, total)
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
                self.lose_worker(worker.id, f"silent for {self.timeouts.worker_s:g} s")
        for client in list(self.clients.values()):
            missed = is_away(client, now) and is_waited_for(client)
            if missed or now - client.last_seen > self.timeouts.client_s:
                self._give_up(client, now)
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

    def _give_up(self, client: Client, now: float) -> None:
        iteration = client.iteration
        if not (iteration.finished or client.over):
            job = f"job {iteration.job.name!r}" if iteration.job.name else "a job without a name"
            self._outcome.losses.append(
                f"a consumer of {job}, in process {client.process}, is given up: nothing was heard "
                f"of it for {now - client.last_seen:.3g} s"
            )
        self.release_client(pb.ClientRequest(client_id=client.id), now)

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
