"""What the registry keeps.

::

    dataset -> job (name) -> iteration (job, repetition) -> task (iteration, worker)
                                                         -> client (a consumer's iterator)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dataservice.config import ShardingPolicy
from dataservice.splits import Splits


class TaskState(enum.Enum):
    """Of a task: its worker has not asked for it, runs it, has given all of it, or is gone."""

    ASSIGNED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()
    LOST = enum.auto()


@dataclass
class Dataset:
    """Attributes: its id, its description as text, and its source indices (-1: no splits)."""

    id: int
    summary: str
    source_length: int


@dataclass
class Worker:
    """Attributes: its id, where it is, and when it was last heard of."""

    id: int
    address: str
    last_seen: float


@dataclass
class Task:
    """One worker's part in an iteration; ``number`` tells the iteration's tasks apart."""

    id: int
    iteration: Iteration
    worker: Worker
    number: int
    state: TaskState = TaskState.ASSIGNED


@dataclass
class Job:
    """What consumers share; ``name`` is None if it is one consumer's own."""

    name: str | None
    dataset: Dataset
    policy: ShardingPolicy
    iterations: dict[int, Iteration] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


@dataclass
class Iteration:
    """One repetition of a job.

    Attributes:
        job: The job.
        repetition: Its number within the job.
        seed: Randomness of what has no seed of its own.
        tasks: By id.
        clients: When each was last heard of, by id.
        splits: What is left of the source, under ShardingPolicy.DYNAMIC.
        left: When the last client left.
        tasks_made: Tasks that there have ever been.
    """

    job: Job
    repetition: int
    seed: int
    splits: Splits | None
    tasks: dict[int, Task] = field(default_factory=dict)
    clients: dict[int, float] = field(default_factory=dict)
    left: float = float("inf")
    tasks_made: int = 0

    @property
    def finished(self) -> bool:
        """Local. Whether every element has been given out."""
        if self.repetition in self.job.finished:
            return True
        return bool(self.tasks) and all(
            task.state is TaskState.FINISHED for task in self.tasks.values()
        )


@dataclass(frozen=True)
class Removal:
    """A task that its worker shall forget."""

    task_id: int
    worker_address: str


@dataclass(frozen=True)
class Timeouts:
    """Silence, in s, after which a worker is lost, a client gone, an iteration forgotten."""

    worker_s: float = 60.0
    client_s: float = 300.0
    iteration_s: float = 300.0
