"""What the registry keeps.

::

    dataset -> job (name) -> iteration (job, repetition) -> part -> task (part, worker)
                                                         -> client (a consumer's iterator)

A part is what one worker at a time evaluates: a sequence of elements, numbered from 0, which is
the same whoever evaluates it. A task is a lease of a part by a worker; when the worker is lost,
another one gets a new task for the part, and goes on where consumers are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dataservice.dispatch.splits import Cursors, Granted
from dataservice.proto import dataservice_pb2 as pb
from dataservice.ranges import RangeSet


@dataclass(eq=False)
class Dataset:
    """A dataset.

    Attributes:
        id: Its id.
        request: What was registered, without the pickle.
        last_used: When a job was last known to be over it.
    """

    id: int
    request: pb.RegisterDatasetRequest
    last_used: float = float("inf")

    @property
    def name(self) -> str:
        """Local. What users call it."""
        return self.request.name or str(self.id)


@dataclass(eq=False)
class Worker:
    """A data worker.

    Attributes:
        id: Its id.
        address: Where it is.
        process: Its process.
        tags: Its tags.
        last_seen: When it was last heard of.
        is_known_to_live: Not until it is heard of, if the journal alone has told of it.
        work: What it has done for its tasks, as it says.
    """

    id: int
    address: str
    process: str
    tags: tuple[str, ...]
    last_seen: float
    is_known_to_live: bool = True
    work: list[pb.TaskWork] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """What consumers share; ``name`` is empty if it is one consumer's own."""

    id: int
    name: str
    dataset: Dataset
    terms: pb.Terms
    iterations: dict[int, Iteration] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    @property
    def shared(self) -> bool:
        """Local. Whether elements go to whoever asks first."""
        return self.terms.reading == pb.SHARED


@dataclass(eq=False)
class Client:
    """A consumer's iterator.

    Attributes:
        id: Its id.
        iteration: What it reads.
        process: Where it lives.
        index: Which of the job's consumers it is, where they are told apart.
        token: What it calls itself.
        last_seen: When it was last heard of, or could not say anything.
        work: What it has done, as it says.
        heard: When it last said something.
        peer: The process that speaks for it, as our endpoint calls that.
        away: Whether its process was lost, and has not been heard of since.
        at_end_since: When it came to its end, if it is there.
        over: Whether it was told to go.
    """

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
    over: bool = False


@dataclass(eq=False)
class Task:
    """A lease of a part.

    Attributes:
        id: Its id.
        part: What is evaluated.
        worker: By whom.
        running: Whether the worker has begun.
        lost: Whether the worker is gone, and clients are to say what has come of it.
        unsettled: The ids of those that have not.
    """

    id: int
    part: Part
    worker: Worker
    running: bool = False
    lost: bool = False
    unsettled: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Part:
    """What one worker at a time evaluates.

    Attributes:
        id: Its key in the journal.
        iteration: What it is a part of.
        number: Tells it from the other parts of the iteration.
        start: Elements before it had been used when the iteration began.
        used: Elements that consumers have used.
        marks: By consumer index, where they are told apart: elements before it are not needed.
        held: Elements that have come to a client from a worker that was lost, by the client's id.
        checkpoint: Where it can be taken up again.
        granted: The splits that it has been given, from the checkpoint on.
        total: Its number of elements; -1 until it is known.
        finished: Whether nothing more comes of it.
        attempts: How often it has been given to a worker.
        home: Index of the only worker that can begin it; -1 if all can.
        task: Its lease.
        avoided: Id of a worker that could not be reached, though it is there.
    """

    id: int
    iteration: Iteration
    number: int
    start: int = 0
    used: RangeSet = field(default_factory=RangeSet)
    marks: dict[int, int] = field(default_factory=dict)
    held: dict[int, RangeSet] = field(default_factory=dict)
    checkpoint: pb.Checkpoint = field(default_factory=pb.Checkpoint)
    granted: Granted = field(default_factory=Granted)
    total: int = -1
    finished: bool = False
    attempts: int = 0
    home: int = -1
    task: Task | None = None
    avoided: int = 0

    def note_mark(self, consumer: int, mark: int, consumers: int) -> None:
        """Local. Take note that a consumer needs nothing before a mark."""
        self.marks[consumer] = max(mark, self.marks.get(consumer, self.start))
        lowest = min(self.marks.get(index, self.start) for index in range(max(consumers, 1)))
        self.used.add(0, lowest)

    def look(self) -> bool:
        """Local. Whether it has just come to its end: all elements are used."""
        if self.finished or self.total < 0 or self.used.prefix < self.total:
            return False
        self.finished = True
        return True

    @property
    def given_out(self) -> bool:
        """Local. Whether every element is used, or held by a consumer that will use it."""
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
        job: The job.
        repetition: Its number within the job.
        seed: Randomness of what has no seed of its own.
        begin: Where it began, if not at its beginning.
        cursors: What is left of the source, where workers share it as they go.
        parts: By number.
        clients: By id.
        joined: Indices of the consumers that have come, where they are told apart.
        served: Addresses of the workers that have had a part of their own.
        left: When the last client left.
        dropped: Parts that were given up with their worker.
        failure: Code and message of the error that ended it, if workers save it.
        version: Grows with what clients are told.
    """

    id: int
    job: Job
    repetition: int
    seed: int
    begin: pb.State | None
    cursors: Cursors | None
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
        """Local. Whether workers shall go on with it."""
        saved = self.job.terms.reading == pb.SAVED and not self.failure[0]
        return (saved or bool(self.clients)) and not self.finished

    @property
    def finished(self) -> bool:
        """Local. Whether every element has been used."""
        if self.repetition in self.job.finished:
            return True
        return bool(self.parts) and all(part.finished for part in self.parts.values())

    @property
    def tasks(self) -> list[Task]:
        """Local. The leases of its parts."""
        return [part.task for part in self.parts.values() if part.task is not None]


@dataclass(frozen=True)
class Removal:
    """Attributes: a task, and the address of the worker that shall forget it."""

    task_id: int
    worker: str


@dataclass(frozen=True)
class Departure:
    """A client that is gone.

    Attributes:
        client_id: The client.
        task_id: A task from which it read.
        worker: Address of the task's worker.
        used: Bounds of the elements of the task's part that have been used.
    """

    client_id: int
    task_id: int
    worker: str
    used: tuple[int, ...]


@dataclass(frozen=True)
class Timeouts:
    """Silence, in s, after which a worker is lost, a client gone, an iteration forgotten."""

    worker_s: float = 60.0
    client_s: float = 300.0
    iteration_s: float = 300.0


Key = tuple[str, int]


@dataclass
class Outcome:
    """What has changed since it was last taken.

    Attributes:
        changed: Records by kind and id; None if they are gone.
        removals: Tasks that workers shall forget.
        leased: Tasks that workers shall begin.
        departures: Clients that workers shall forget.
        losses: What is to be said of workers and clients that were lost at work.
    """

    changed: dict[Key, Any] = field(default_factory=dict)
    removals: list[Removal] = field(default_factory=list)
    leased: list[Task] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
