"""The clients of a dispatcher: consumers' iterators, and what they tell. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dataservice.dispatch.endings import is_away
from dataservice.dispatch.homes import Homes
from dataservice.dispatch.jobs import Jobs
from dataservice.dispatch.records import Client, Departure, Iteration, Part, Task, Timeouts
from dataservice.dispatch.terms import check_index_is_free, told_apart
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet
from mpidist.errors import InvalidArgumentError, NotFoundError


class Clients(Jobs):
    """The part of the registry that has clients, and takes what they say.

    Args:
        timeouts: When to give up on those who say nothing.
        ids: Where ids come from.
        homes: The places of workers under static sharding.
    """

    def __init__(self, timeouts: Timeouts, ids: Iterator[int], homes: Homes) -> None:
        super().__init__(ids, homes)
        self.timeouts = timeouts

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
                "target_workers='LOCAL' needs a WorkerServer in the consumer's own process, "
                f"but no worker of this dispatcher runs in {request.process}"
            )
        iteration = self._iteration(request, dataset, seed)
        if told_apart(iteration.job.terms):
            self._make_room(iteration, request.consumer_index, now)
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
        client.last_seen = client.heard = now
        client.away = False
        client.at_end_since = now if request.at_end else None
        client.over &= request.at_end
        if request.HasField("work"):
            client.work = request.work
        self._take_report(client, request)
        return client

    def lose_clients(self, peer: str) -> None:
        """Local. The process of some clients seems to be gone; it may come back."""
        for client in self.clients.values():
            client.away |= client.peer == peer

    def unknown_client(self, client_id: int) -> NotFoundError:
        """Local. What a client hears that is none."""
        return NotFoundError(
            f"consumer {client_id} is not known: it has left, or has been silent for "
            f"{self.timeouts.client_s:g} s (or gone, as others waited for it), or others have "
            "taken its job back to a state, or the dispatcher was started anew without its journal "
            "(work_dir, fault_tolerant_mode)"
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
            if reads_along:
                self._depart(client.id, task)
        if iteration.clients:
            iteration.version += reads_along  # there may be something for the others
            self.leases.take_back(iteration)
            self.leases.place(iteration, self.workers.values())
            return
        iteration.left = now
        if not iteration.job.name or iteration.finished:
            self._forget(iteration)

    # Inside

    def _depart(self, client_id: int, task: Task) -> None:
        if task.running and not task.lost:
            used = tuple(task.part.used.bounds)
            self._outcome.departures.append(
                Departure(client_id, task.id, task.worker.address, used)
            )

    def _make_room(self, iteration: Iteration, index: int, now: float) -> None:
        """A consumer comes, perhaps in the place of one that was killed."""
        for client in list(iteration.clients.values()):
            if client.index == index and iteration.job.name and is_away(client, now):
                self.release_client(pb.ClientRequest(client_id=client.id), now)

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
