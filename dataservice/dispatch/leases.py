"""Which worker evaluates which part. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dataservice.dispatch.homes import Homes
from dataservice.dispatch.records import Client, Iteration, Part, Removal, Task, Worker
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import NotFoundError

# Parts that are fixed in number; under the other readings there is one for each worker.
_NUMBERED = (pb.ORDERED, pb.ROUNDS, pb.SAVED)
# Parts of which every consumer has elements: one that cannot read them would wait for ever.
_FOR_ALL = (pb.ORDERED, pb.ROUNDS)
_BY_WORKER = (pb.FILE, pb.DATA, pb.FILE_OR_DATA, pb.HINT)


class Leases:
    """Gives parts to workers, and to others when those are lost.

    Args:
        ids: Where ids come from.
        homes: The places of workers under static sharding.
        touch: Called with what has changed.
    """

    def __init__(
        self,
        ids: Iterator[int],
        homes: Homes,
        touch: Callable[[Part | Iteration], None],
    ) -> None:
        self._ids = ids
        self._homes = homes
        self._touch = touch
        self.tasks: dict[int, Task] = {}
        self.removals: list[Removal] = []
        self.leased: list[Task] = []

    def get(self, task_id: int) -> Task:
        """Local. A task.

        Raises:
            NotFoundError: It has been forgotten, or its worker counts as lost.
        """
        task = self.tasks.get(task_id)
        if task is None:
            raise NotFoundError(
                f"unknown task {task_id}: its iteration has ended, or another worker has its part"
            )
        if task.lost:
            raise NotFoundError(f"task {task_id} is lost: its worker {task.worker.address} is gone")
        return task

    def begin(self, iteration: Iteration) -> None:
        """Local. Make the parts of an iteration that has a fixed number of them."""
        terms = iteration.job.terms
        for state in iteration.begin.parts if iteration.begin is not None else ():
            part = self._add(iteration, state.part)
            part.start, part.total = state.start, state.total
            part.checkpoint.CopyFrom(state.checkpoint)
            part.granted = type(part.granted).of(list(state.splits))
            part.used.add(0, state.start)
            part.look()
        if terms.reading in _NUMBERED:
            for number in range(len(iteration.parts), terms.num_shards):
                self._add(iteration, number)
        elif by_worker(terms) and iteration.begin is None:
            # What goes on from a state has the parts that it had, for any workers.
            for number in range(len(iteration.parts), len(self._homes)):
                self._add(iteration, number).home = number

    def place(self, iteration: Iteration, workers: Iterable[Worker]) -> None:
        """Local. Give every part a worker that has none, and every new worker a part."""
        able = [worker for worker in workers if _can_serve(worker, iteration)]
        load = {worker.id: 0 for worker in able}
        for task in iteration.tasks:
            if task.worker.id in load and not task.part.finished:
                load[task.worker.id] += 1
        for part in iteration.parts.values():
            if part.task is None and not part.finished and not part.given_out:
                fit = [w for w in able if part.home in (-1, self._homes.of(w.address))]
                if fit:
                    worker = min(fit, key=lambda w: _reluctance(part, w, load))
                    load[worker.id] += 1
                    self._lease(part, worker)
        for worker in able:
            if worker.address not in iteration.served:
                self._serve_new(iteration, worker, load)

    def _serve_new(self, iteration: Iteration, worker: Worker, load: dict[int, int]) -> None:
        """A worker that has had no part of an iteration, perhaps because it has just come."""
        iteration.served.add(worker.address)
        self._touch(iteration)
        terms = iteration.job.terms
        if terms.reading in _NUMBERED:
            # What a worker saves stays with it: to take it up elsewhere costs more.
            while terms.reading != pb.SAVED and load and max(load.values()) > load[worker.id] + 1:
                busiest = max(load, key=lambda key: load[key])
                task = next(
                    t for t in iteration.tasks if t.worker.id == busiest and not t.part.finished
                )
                self._withdraw(task)
                self._lease(task.part, worker)
                load[busiest] -= 1
                load[worker.id] += 1
        elif (
            terms.policy not in _BY_WORKER
            and not load[worker.id]
            and (
                # What goes on from a state has the copies that it had.
                iteration.begin is None or terms.policy == pb.DYNAMIC
            )
        ):
            self._lease(self._add(iteration, len(iteration.parts)), worker)

    def lose(self, task: Task) -> None:
        """Local. A task's worker is gone."""
        part, terms = task.part, task.part.iteration.job.terms
        part.iteration.version += 1
        self._touch(part)
        if part.finished or part.given_out:
            self._withdraw(task, tell=False)
        elif task.running and terms.delivery == pb.AT_MOST_ONCE:
            part.finished = True
            part.iteration.dropped += 1
            self._withdraw(task, tell=False)
        elif task.running and terms.delivery == pb.EXACTLY_ONCE and terms.reading == pb.SHARED:
            task.lost = True
            task.unsettled = set(part.iteration.clients)
            self.look(task)
        else:
            # Consumers that say what they want can ask anybody for it.
            self._withdraw(task, tell=False)

    def take_back(self, iteration: Iteration) -> None:
        """Local. Free what clients cannot read, after one has come or left."""
        for task in iteration.tasks:
            if task.lost or task.part.finished or _can_serve(task.worker, iteration):
                continue
            if iteration.job.terms.reading in _FOR_ALL:
                self._withdraw(task)  # consumers ask its next worker
            else:
                self.lose(task)

    def look(self, task: Task) -> None:
        """Local. See whether all clients have said what has come of a lost task."""
        if task.lost and not task.unsettled:
            self._withdraw(task, tell=False)

    def forget(self, iteration: Iteration) -> None:
        """Local. Nobody needs an iteration any more."""
        for task in iteration.tasks:
            self._withdraw(task)

    def known(self, task: Task) -> None:
        """Local. Take a task from the journal."""
        self.tasks[task.id] = task

    def _add(self, iteration: Iteration, number: int) -> Part:
        part = Part(next(self._ids), iteration, number)
        iteration.parts[number] = part
        self._touch(part)
        return part

    def _lease(self, part: Part, worker: Worker) -> None:
        part.task = Task(next(self._ids), part, worker)
        part.attempts += 1
        self.tasks[part.task.id] = part.task
        self.leased.append(part.task)
        part.home = -1
        if worker.address not in part.iteration.served:
            part.iteration.served.add(worker.address)
            self._touch(part.iteration)
        part.iteration.version += 1
        self._touch(part)

    def _withdraw(self, task: Task, *, tell: bool = True) -> None:
        del self.tasks[task.id]
        task.part.task = None
        task.part.iteration.version += 1
        self._touch(task.part)
        if tell and task.running:
            self.removals.append(Removal(task.id, task.worker.address))


def may_read(client: Client, worker: Worker) -> bool:
    """Local. Whether a client reads from a worker."""
    target = client.iteration.job.terms.target
    if target == pb.LOCAL:
        return client.process == worker.process
    if target == pb.ANY or "COLOCATED" not in worker.tags:
        return True
    # Such a worker is there for the consumers of its own host.
    return client.process.partition("/")[0] == worker.process.partition("/")[0]


def by_worker(terms: pb.Terms) -> bool:
    """Local. Whether every worker that is configured has a part of its own."""
    return terms.policy in _BY_WORKER and terms.reading not in _NUMBERED


def _reluctance(part: Part, worker: Worker, load: dict[int, int]) -> tuple[bool, bool, int]:
    """How little a worker suits a part.

    One that was there before the dispatcher was started again may have ended with it: every part
    that it got would be waited for until consumers have found that out.
    """
    return worker.id == part.avoided, not worker.is_known_to_live, load[worker.id]


def _can_serve(worker: Worker, iteration: Iteration) -> bool:
    reading = iteration.job.terms.reading
    if reading == pb.SAVED:
        return True
    may = (may_read(client, worker) for client in iteration.clients.values())
    return all(may) if reading in _FOR_ALL else any(may)
