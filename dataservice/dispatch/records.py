"""The records of the registry.

::

    dataset -> job (name) -> iteration (job, repetition) -> part -> task (part, worker)
                                                         -> client (a consumer's iterator)

One worker at a time evaluates a part: a sequence of elements, numbered from 0, which is the same
on every worker. A task is a lease of a part by a worker. When the worker is lost, another one gets
a new task for the part, and goes on where the consumers are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dataservice.consumption import Mode, mode_of
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet

# Seconds without a connection after which a process counts as gone.
AWAY_S = 5.0
# Seconds after an answered heartbeat for which a client uses its elements without another one.
_LEASE_S = 4.0


@dataclass(eq=False)
class Dataset:
    """A dataset.

    Attributes:
        id: Its id.
        request: Its registration, without the pickle.
        last_used: The last time at which a job was known to use it.
    """

    kind: ClassVar = "dataset"
    id: int
    request: pb.RegisterDatasetRequest
    last_used: float = float("inf")

    @property
    def name(self) -> str:
        """The name that users call it by."""
        return self.request.name or str(self.id)


@dataclass(eq=False)
class Worker:
    """A data worker.

    Attributes:
        id: Its id.
        address: The address of its endpoint.
        process: Its process.
        tags: Its tags.
        last_seen: The time of its last message.
        is_known_to_live: False for a worker of the journal until its first heartbeat.
        work: Its report of the work for its tasks.
    """

    kind: ClassVar = "worker"
    id: int
    address: str
    process: str
    tags: tuple[str, ...]
    last_seen: float
    is_known_to_live: bool = True
    work: list[pb.TaskWork] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """A stream of elements that consumers share; the name of one consumer's own job is empty.

    Attributes:
        id: Its id.
        name: Its name.
        dataset: Its dataset.
        terms: The options that all its consumers agree on.
        iterations: The iterations that go on, by repetition.
        finished: The repetitions that have ended.
    """

    kind: ClassVar = "job"
    id: int
    name: str
    dataset: Dataset
    terms: pb.Terms
    iterations: dict[int, Iteration] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    @property
    def mode(self) -> Mode:
        """Its mode of consumption."""
        return mode_of(self.terms)


@dataclass(eq=False)
class Client:
    """A consumer's iterator.

    The end of an epoch, for consumers that share elements: a consumer that has drained all its
    tasks reports ``at_end``. It holds no elements then, and the remaining ones belong to other
    consumers. It may leave once another consumer has sent a heartbeat after that report, because
    that consumer will handle the remaining elements. (It waits for parts that others read and it
    cannot, since those may come to it.) The last consumer stays until every element is consumed, so
    it gets the elements of consumers that are given up or leave early.

    Attributes:
        id: Its id.
        iteration: The iteration that it reads.
        process: Its process.
        index: Its consumer index, if the consumers of the job have indices.
        token: The number by which it calls itself.
        last_seen: The time of its last message, or at which it could not send any.
        work: Its report of its work.
        heard: The time of its last message.
        peer: The process that speaks for it, by the name that our endpoint gives it.
        away: True if its process was lost and has not been heard of since.
        at_end_since: The time at which it came to its end, if it is there.
        dismissed: True if it was told that it may finish.
    """

    kind: ClassVar = "client"
    id: int
    iteration: Iteration
    process: str
    index: int
    token: int
    last_seen: float
    work: pb.ClientWork = field(default_factory=pb.ClientWork)
    heard: float = float("-inf")
    peer: str = ""
    away: bool = False
    at_end_since: float | None = None
    dismissed: bool = False

    def may_read(self, worker: Worker) -> bool:
        """Return whether the client reads from a worker."""
        target = self.iteration.job.terms.target
        if target == pb.LOCAL:
            return self.process == worker.process
        if target == pb.ANY or "COLOCATED" not in worker.tags:
            return True
        # Such a worker serves the consumers of its own host.
        return self.process.partition("/")[0] == worker.process.partition("/")[0]

    def dismiss_if_done(self) -> bool:
        """Return whether the client is at its end and may leave.

        Mark it as dismissed then, so that other clients no longer count on it.
        """
        iteration, since = self.iteration, self.at_end_since
        if since is None:
            return False
        job = iteration.job
        if not job.mode.is_first_come or iteration.finished:
            self.dismissed = True
        elif not any(self._may_get(part) for part in iteration.parts.values()):
            alone = not any(not each.dismissed and each.heard >= since for each in self._others)
            # Under at_most_once no elements return from others.
            self.dismissed |= job.terms.delivery == pb.AT_MOST_ONCE or not alone
        return self.dismissed

    @property
    def is_asked_for(self) -> bool:
        """True if another client is at its end and has not heard of this one since."""
        return any(
            each.at_end_since is not None and not each.dismissed and self.heard < each.at_end_since
            for each in self._others
        )

    @property
    def is_waited_for(self) -> bool:
        """True if others need to hear of the client, or that it is gone."""
        return self.is_asked_for or any(
            self.id in task.pending_acks for task in self.iteration.tasks
        )

    def is_away(self, now: float) -> bool:
        """Return whether the client's process seems to be gone."""
        return self.away and now - self.last_seen > AWAY_S

    def _may_get(self, part: Part) -> bool:
        """Return whether elements of a part may come from a worker that is still to come."""
        if part.finished:
            return False
        if part.task is None:
            return not part.fully_held
        return part.task.lost or not self.may_read(part.task.worker)

    @property
    def _others(self) -> list[Client]:
        return [each for each in self.iteration.clients.values() if each is not self]


@dataclass(eq=False)
class Task:
    """A lease of a part.

    Attributes:
        id: Its id.
        part: The part.
        worker: The worker that evaluates the part.
        running: True if the worker has begun.
        lost: True if the worker is gone, and clients are to report the elements they hold.
        pending_acks: The ids of clients that have not acknowledged the loss.
    """

    id: int
    part: Part
    worker: Worker
    running: bool = False
    lost: bool = False
    pending_acks: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Granted:
    """The splits that are assigned to one part, in order.

    A position of the part always has the same index. So another worker of the part, or a worker
    that repeats a lost request, gets the same indices.

    Attributes:
        first: The position of the first index in ``splits``.
        splits: The splits from that position on.
    """

    first: int = 0
    splits: tuple[range, ...] = ()

    @property
    def stop(self) -> int:
        """The position behind the last assigned index."""
        return self.first + sum(map(len, self.splits))

    def at(self, position: int) -> range | None:
        """Return the indices of a split from a position on; None if no split has the position."""
        start = self.first
        for split in self.splits:
            if start <= position < start + len(split):
                return split[position - start :]
            start += len(split)
        return None

    def plus(self, split: range) -> Granted:
        """Return a copy with one more split."""
        return Granted(self.first, (*self.splits, split))

    def after(self, position: int) -> Granted:
        """Return a copy without the indices before a position."""
        first, splits = self.first, list(self.splits)
        while splits and first + len(splits[0]) <= position:
            first += len(splits.pop(0))
        if splits and position > first:
            splits[0] = splits[0][position - first :]
            first = position
        return Granted(first, tuple(splits))

    def state(self) -> pb.Splits:
        """Return the splits as a message."""
        bounds = [bound for split in self.splits for bound in (split.start, split.stop)]
        return pb.Splits(first=self.first, bounds=bounds)

    @classmethod
    def of(cls, state: pb.Splits) -> Granted:
        """Return the splits of a message."""
        numbers = iter(state.bounds)
        splits = tuple(range(start, stop) for start, stop in zip(numbers, numbers, strict=True))
        return cls(state.first, splits)


@dataclass(eq=False)
class Part:
    """A part of an iteration, which one worker at a time evaluates.

    Attributes:
        id: Its key in the journal.
        iteration: Its iteration.
        number: Its number in the iteration.
        start: Elements before it had been used when the iteration began.
        used: Elements that consumers have used.
        watermarks: By consumer index, if consumers have one: elements before it are not needed.
        held: Elements from lost workers that clients hold, by the id of the client.
        checkpoint: The position at which another worker can go on.
        granted: The splits that it has been given, from the checkpoint on.
        total: Its number of elements; -1 until it is known.
        finished: True if nothing more comes of it.
        attempts: The number of its leases so far.
        slot: The slot of the only worker that can begin it; -1 if all can.
        task: Its lease.
        avoided: Id of a worker that lives, but could not be reached.
    """

    kind: ClassVar = "part"
    id: int
    iteration: Iteration
    number: int
    start: int = 0
    used: RangeSet = field(default_factory=RangeSet)
    watermarks: dict[int, int] = field(default_factory=dict)
    held: dict[int, RangeSet] = field(default_factory=dict)
    checkpoint: pb.Checkpoint = field(default_factory=pb.Checkpoint)
    granted: Granted = field(default_factory=Granted)
    total: int = -1
    finished: bool = False
    attempts: int = 0
    slot: int = -1
    task: Task | None = None
    avoided: int = 0

    def advance_watermark(self, consumer: int, mark: int, consumers: int) -> None:
        """Note that a consumer needs no elements before a mark."""
        self.watermarks[consumer] = max(mark, self.watermarks.get(consumer, self.start))
        marks = (self.watermarks.get(index, self.start) for index in range(max(consumers, 1)))
        self.used.add(0, min(marks))

    def finish_if_used(self) -> bool:
        """Mark the part as finished if all its elements are used. Return whether it is new."""
        if self.finished or self.total < 0 or self.used.prefix < self.total:
            return False
        self.finished = True
        return True

    @property
    def fully_held(self) -> bool:
        """True if every element is used, or held by a consumer that will use it."""
        if not self.held or self.total < 0:
            return False
        everywhere = RangeSet(self.used.bounds)
        for ranges in self.held.values():
            everywhere.update(ranges)
        return everywhere.prefix >= self.total


@dataclass(eq=False)
class Iteration:
    """One repetition of a job.

    Attributes:
        id: Its id.
        job: Its job.
        repetition: Its number within the job.
        seed: Randomness of steps that have no seed of their own.
        begin: The state from which it began, if not at its beginning.
        next_index: The first source index that no worker has been given; None if workers do not
            take splits of the source.
        parts: By number.
        clients: By id.
        joined: Indices of the consumers that have come, if consumers have indices.
        served: Addresses of the workers that have had a part of their own.
        left: The time at which the last client left.
        dropped: The number of parts that were given up with their worker.
        failure: Code and message of the error that ended it, if workers save it.
        version: A number that grows with every change that clients are told of.
    """

    kind: ClassVar = "iteration"
    id: int
    job: Job
    repetition: int
    seed: int
    begin: pb.State | None
    next_index: int | None
    parts: dict[int, Part] = field(default_factory=dict)
    clients: dict[int, Client] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    served: set[str] = field(default_factory=set)
    left: float = float("inf")
    dropped: int = 0
    failure: tuple[int, str] = (0, "")
    version: int = 1

    @property
    def wanted(self) -> bool:
        """True if workers shall go on with it."""
        saved = self.job.mode.writes_snapshot and not self.failure[0]
        return (saved or bool(self.clients)) and not self.finished

    @property
    def finished(self) -> bool:
        """True if every element has been used."""
        if self.repetition in self.job.finished:
            return True
        return bool(self.parts) and all(part.finished for part in self.parts.values())

    @property
    def tasks(self) -> list[Task]:
        """The leases of its parts."""
        return [part.task for part in self.parts.values() if part.task is not None]


@dataclass(frozen=True)
class Timeouts:
    """Silence, in s, after which a worker is lost, a client gone, an iteration forgotten."""

    worker_s: float = 60.0
    client_s: float = 300.0
    iteration_s: float = 300.0

    @property
    def lease_s(self) -> float:
        """For how long a silent client uses its elements: less than others wait for it."""
        return _LEASE_S / AWAY_S * min(AWAY_S, self.client_s)


Key = tuple[str, int]
Record = Dataset | Worker | Job | Client | Part | Iteration


@dataclass
class Outcome:
    """The changes since it was last taken.

    A task is a part of its part's record.

    Attributes:
        changed: Records by kind and id; None if they are gone.
        updates: The tasks to begin and the tasks and clients to forget, by the worker's address.
        losses: Messages for the log about workers and clients that were lost at work.
    """

    changed: dict[Key, Record | None] = field(default_factory=dict)
    updates: dict[str, pb.TasksUpdate] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)

    def update_of(self, worker: Worker) -> pb.TasksUpdate:
        """Return the update of a worker, to be added to."""
        return self.updates.setdefault(worker.address, pb.TasksUpdate())

    def touch(self, record: Record) -> None:
        """Note that a record is new or has changed."""
        self.changed[record.kind, record.id] = record

    def remove(self, record: Record) -> None:
        """Note that a record is gone."""
        self.changed[record.kind, record.id] = None

    def add(self, later: Outcome) -> None:
        """Add later changes."""
        self.changed.update(later.changed)
        for worker, update in later.updates.items():
            self.updates.setdefault(worker, pb.TasksUpdate()).MergeFrom(update)
        self.losses += later.losses

    def take(self) -> Outcome:
        """Return the changes, and begin anew."""
        taken = Outcome(self.changed, self.updates, self.losses)
        self.changed, self.updates, self.losses = {}, {}, []
        return taken
