"""Leases of parts by workers, and the splits of the source that parts get. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from dataservice.consumption import mode_of
from dataservice.dataset.base import ENDLESS
from dataservice.dispatch.records import (
    Client,
    Granted,
    Iteration,
    Outcome,
    Part,
    Task,
    Worker,
)
from dataservice.proto import dataservice_pb2 as pb
from mpidist.errors import InvalidArgumentError, NotFoundError

_STATIC = (pb.FILE, pb.DATA, pb.FILE_OR_DATA, pb.HINT)
# Splits are small enough to balance uneven workers at the end, and large enough to be rare.
_SPLITS_PER_WORKER = 4
_LARGEST = 4096
# An infinite source has no end at which smaller splits balance the workers.
_LARGEST_OF_ENDLESS = 256


def next_split(start: int, period: int, workers: int) -> range:
    """Return the next split of a source.

    Indices continue from pass to pass over the source: index ``k * period + i`` is index i of pass
    k. Workers notice the end of the last pass themselves. Splits shrink towards the end of a pass,
    so that all workers end at about the same time.

    Args:
        start: The first index that is not assigned.
        period: The number of indices of one pass.
        workers: The number of workers that share the indices.
    """
    if not period:
        return range(0)
    remaining = period - start % period
    largest = _LARGEST if remaining < ENDLESS >> 1 else _LARGEST_OF_ENDLESS
    size = min(max(remaining // (_SPLITS_PER_WORKER * max(workers, 1)), 1), largest)
    return range(start, start + size)


_ADDRESS = re.compile(r"(?:(?P<protocol>[^/]*)://)?(?P<host>[^/]+?)(?::(?P<port>\d+|%port%))?")


def worker_index(address: str, worker_addresses: Sequence[str]) -> int:
    """Return the place of a worker in the list of configured addresses.

    An entry without a port, or with ``%port%`` for one, stands for any worker of its host, but for
    one only. So the caller puts the address there::

        addresses[worker_index(address, addresses)] = address

    Args:
        address: Of the worker, as ``host:port``, with or without ``protocol://``.
        worker_addresses: Entries ``host:port``, ``host:%port%`` or ``host``, with or without
            ``protocol://``, some of them replaced by the addresses of workers.

    Returns:
        The index of the entry that names the address; without one, of the first that can stand
        for it.

    Raises:
        InvalidArgumentError: There is none: the worker is not configured, or others have taken
            the entries of its host.
    """
    entries = [_parts(entry) for entry in worker_addresses]
    protocol, host, port = _parts(address)
    there = [
        number
        for number, (its_protocol, its_host, _) in enumerate(entries)
        if its_host == host and (its_protocol == protocol or not (its_protocol and protocol))
    ]
    named = [number for number in there if entries[number][2] == port]
    open_ones = [number for number in there if entries[number][2] in ("", "%port%")]
    for number in named + open_ones:
        return number
    raise InvalidArgumentError(
        f"data worker {address} is not in DispatcherConfig.worker_addresses "
        f"{list(worker_addresses)}, or other workers of its host have taken all entries: add it "
        "to the list, or start it at an address of the list"
    )


def _parts(address: str) -> tuple[str, str, str]:
    """Protocol, host and port; empty where the address has none."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise InvalidArgumentError(
            f"{address!r} is not the address of a worker: expected [protocol://]host[:port]"
        )
    return found["protocol"] or "", found["host"].lower(), found["port"] or ""


class WorkerSlots:
    """The slots of workers under static sharding: their indices in the configured addresses.

    Args:
        addresses: As configured; see :func:`worker_index`. Empty without static sharding.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._taken: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def assign(self, address: str, living: Collection[str]) -> None:
        """Assign a slot to a worker. A worker that returns keeps its slot.

        Args:
            address: The worker's address.
            living: The addresses of all registered workers.

        Raises:
            InvalidArgumentError: There is no slot for it.
        """
        if self._addresses and address not in self._taken.values():
            open_ones = [
                self._taken[slot] if self._taken.get(slot) in living else entry
                for slot, entry in enumerate(self._addresses)
            ]
            self._taken[worker_index(address, open_ones)] = address

    def of(self, address: str) -> int:
        """Return the slot of a worker; -1 if it has none."""
        slots = [slot for slot, taken in self._taken.items() if taken == address]
        return slots[0] if slots else -1


class Scheduler:
    """Leases parts to workers, and to other workers when those are lost.

    Args:
        ids: Source of new ids.
        outcome: Takes the changes.
        worker_addresses: Addresses of the workers for static sharding.

    Attributes:
        slots: The slots of workers under static sharding.
        tasks: All leases, by id.
    """

    def __init__(
        self, ids: Iterator[int], outcome: Outcome, worker_addresses: Sequence[str]
    ) -> None:
        self._ids = ids
        self._outcome = outcome
        self.slots = WorkerSlots(worker_addresses)
        self.tasks: dict[int, Task] = {}

    def get(self, task_id: int) -> Task:
        """Return a task.

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

    def tasks_of(self, worker: Worker) -> list[Task]:
        """List the tasks of a worker."""
        return [task for task in self.tasks.values() if task.worker is worker]

    def check_terms(self, terms: pb.Terms) -> None:
        """Raise NotFoundError if a job is sharded statically and no workers are configured."""
        if _has_part_for_each_slot(terms) and not len(self.slots):
            raise NotFoundError(
                f"ShardingPolicy.{pb.ShardingPolicy.Name(terms.policy)} divides the "
                "dataset between workers that are known in advance: give the dispatcher "
                "DispatcherConfig(worker_addresses=...)"
            )

    def make_parts(self, iteration: Iteration) -> None:
        """Make the parts of a new iteration, if their number is fixed."""
        job = iteration.job
        for state in iteration.begin.parts if iteration.begin is not None else ():
            part = self._add(iteration, state.part)
            part.start, part.total = state.start, state.total
            part.checkpoint.CopyFrom(state.checkpoint)
            part.granted = Granted.of(state.splits)
            part.used.add(0, state.start)
            part.finish_if_used()
        if job.mode.has_fixed_parts:
            for number in range(len(iteration.parts), job.terms.num_shards):
                self._add(iteration, number)
        elif _has_part_for_each_slot(job.terms) and iteration.begin is None:
            # An iteration that goes on from a state keeps its parts, for any workers.
            for number in range(len(iteration.parts), len(self.slots)):
                self._add(iteration, number).slot = number

    def place(self, iteration: Iteration, workers: Iterable[Worker]) -> None:
        """Lease every part that has no worker, and serve every new worker."""
        able = [worker for worker in workers if _can_serve(worker, iteration)]
        load = {worker.id: 0 for worker in able}
        for task in iteration.tasks:
            if task.worker.id in load and not task.part.finished:
                load[task.worker.id] += 1
        for part in iteration.parts.values():
            if part.task is None and not part.finished and not part.fully_held:
                fit = [w for w in able if part.slot in (-1, self.slots.of(w.address))]
                if fit:
                    worker = min(fit, key=lambda w: _reluctance(part, w, load))
                    load[worker.id] += 1
                    self._lease(part, worker)
        for worker in able:
            if worker.address not in iteration.served:
                self._serve_new(iteration, worker, load)

    def _serve_new(self, iteration: Iteration, worker: Worker, load: dict[int, int]) -> None:
        """Give work to a worker that has had no part of an iteration."""
        iteration.served.add(worker.address)
        self._outcome.touch(iteration)
        terms, mode = iteration.job.terms, iteration.job.mode
        if mode.has_fixed_parts:
            # To move a stream costs more than it gains: the next worker starts at the last commit.
            moves = not mode.writes_snapshot
            while moves and load and max(load.values()) > load[worker.id] + 1:
                busiest = max(load, key=lambda key: load[key])
                task = next(
                    t for t in iteration.tasks if t.worker.id == busiest and not t.part.finished
                )
                self._withdraw(task)
                self._lease(task.part, worker)
                load[busiest] -= 1
                load[worker.id] += 1
        elif (
            terms.policy not in _STATIC
            and not load[worker.id]
            and (
                # An iteration that goes on from a state has the copies that it had.
                iteration.begin is None or terms.policy == pb.DYNAMIC
            )
        ):
            self._lease(self._add(iteration, len(iteration.parts)), worker)

    def lose(self, task: Task) -> None:
        """Take the part of a worker that is gone."""
        part, job = task.part, task.part.iteration.job
        part.iteration.version += 1
        self._outcome.touch(part)
        if part.finished or part.fully_held:
            self._withdraw(task, notify=False)
        elif task.running and job.terms.delivery == pb.AT_MOST_ONCE:
            part.finished = True
            part.iteration.dropped += 1
            self._outcome.touch(part.iteration)
            self._withdraw(task, notify=False)
        elif task.running and job.mode.leases_elements(job.terms):
            task.lost = True
            task.pending_acks = set(part.iteration.clients)
            self._end_if_acknowledged(task)
        else:
            # Consumers that name the elements they want can ask any worker for them.
            self._withdraw(task, notify=False)

    def acknowledge_loss(self, task: Task, client: Client) -> None:
        """Note that a client takes nothing more from a lost task, and has reported all it holds."""
        if client.id in task.pending_acks:
            task.pending_acks.discard(client.id)
            self._outcome.touch(task.part)
        self._end_if_acknowledged(task)

    def free_unreadable(self, iteration: Iteration) -> None:
        """Withdraw tasks that clients cannot read, after a client has come or left."""
        for task in iteration.tasks:
            if task.lost or task.part.finished or _can_serve(task.worker, iteration):
                continue
            if iteration.job.mode.has_consumer_index:
                self._withdraw(task)  # consumers ask its next worker
            else:
                self.lose(task)

    def forget(self, iteration: Iteration) -> None:
        """Withdraw all tasks of an iteration."""
        for task in iteration.tasks:
            self._withdraw(task)

    def restore(self, task: Task) -> None:
        """Add a task that is in the journal."""
        self.tasks[task.id] = task

    def _end_if_acknowledged(self, task: Task) -> None:
        if task.lost and not task.pending_acks:
            self._withdraw(task, notify=False)

    def _add(self, iteration: Iteration, number: int) -> Part:
        part = Part(next(self._ids), iteration, number)
        iteration.parts[number] = part
        self._outcome.touch(part)
        return part

    def _lease(self, part: Part, worker: Worker) -> None:
        part.task = Task(next(self._ids), part, worker)
        part.attempts += 1
        self.tasks[part.task.id] = part.task
        if not part.iteration.job.mode.writes_snapshot:
            # The answers to heartbeats name the tasks of saves, some at a time.
            self._outcome.update_of(worker).begin.append(part.task.id)
        part.slot = -1
        if worker.address not in part.iteration.served:
            part.iteration.served.add(worker.address)
            self._outcome.touch(part.iteration)
        part.iteration.version += 1
        self._outcome.touch(part)

    def _withdraw(self, task: Task, *, notify: bool = True) -> None:
        del self.tasks[task.id]
        task.part.task = None
        task.part.iteration.version += 1
        self._outcome.touch(task.part)
        if notify and task.running:
            self._outcome.update_of(task.worker).forget.append(task.id)


def _has_part_for_each_slot(terms: pb.Terms) -> bool:
    """Return whether every configured worker has a part of its own."""
    return terms.policy in _STATIC and not mode_of(terms).has_fixed_parts


def _reluctance(part: Part, worker: Worker, load: dict[int, int]) -> tuple[bool, bool, int]:
    """Return how little a worker suits a part, as a key for sorting.

    A worker that registered before the dispatcher was started again may have ended with it. Every
    part that it got would be waited for until consumers have found that out.
    """
    return worker.id == part.avoided, not worker.is_known_to_live, load[worker.id]


def _can_serve(worker: Worker, iteration: Iteration) -> bool:
    mode = iteration.job.mode
    if mode.writes_snapshot:
        return True
    may = (client.may_read(worker) for client in iteration.clients.values())
    return all(may) if mode.has_consumer_index else any(may)
