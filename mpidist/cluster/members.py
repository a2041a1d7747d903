"""The tasks of a cluster on their ranks: who they are, what they do, and when all is over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from mpidist.cluster.spec import ClusterSpec
from mpidist.endpoint import Address, Endpoint, Request
from mpidist.errors import DeadlineExceededError, InvalidArgumentError
from mpidist.proto.mpidist_pb2 import TaskState

Task = tuple[str, int]


@dataclass
class _Member:
    state: TaskState.State
    rank: int


class Members:
    """What the tasks of a cluster have said of themselves.

    Tasks tell each other when they start, when they begin to wait in ``join``, and when they
    leave; each keeps the last word of every other.

    Args:
        spec: The cluster.
        task: This task.
        rank: This rank.
        endpoint: This task's endpoint.
        left: Ranks whose scripts have ended, kept by the runtime.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        task: Task,
        rank: int,
        endpoint: Endpoint,
        left: Mapping[int, float],
    ) -> None:
        self._spec = spec
        self._task = task
        self._rank = rank
        self._endpoint = endpoint
        self._left = left
        self._members: dict[Task, _Member] = {}
        self._problem: str | None = None
        endpoint.register("cluster", {"State": self._on_state})

    def gather(self, candidates: list[int], colocated: Mapping[Task, Task], limit_s: float) -> None:
        """Collective over the tasks. Return once every task has said hello.

        Args:
            candidates: Ranks that may be tasks of the cluster.
            colocated: Tasks that live in another's process, and that other.
            limit_s: Seconds to wait.

        Raises:
            DeadlineExceededError: Some have not; the message names them.
            InvalidArgumentError: A task believes in another cluster spec; the message names it.
        """
        self._members[self._task] = _Member(TaskState.STARTED, self._rank)
        self._tell(TaskState.STARTED, candidates)
        expected = [task for task in self._spec.tasks() if task not in colocated]

        def missing() -> list[Task]:
            return [task for task in expected if task not in self._members]

        self._endpoint.serve(
            lambda: self._problem is not None or not missing(), time.monotonic() + limit_s
        )
        if self._problem is not None:
            raise InvalidArgumentError(self._problem)
        if missing():
            names = ", ".join(f"{job} {index}" for job, index in missing())
            raise DeadlineExceededError(
                f"{self._task[0]} {self._task[1]} on rank {self._rank} waited {limit_s:g} s for "
                f"{names} to start: every task must start a Server of the same cluster "
                "(MPIDIST_START_TIMEOUT_S sets the limit)"
            )
        for task, host in colocated.items():
            self._members[task] = self._members[host]

    def rank_of(self, task: Task) -> int:
        """Local. Rank of a task."""
        return self._members[task].rank

    def ranks(self) -> list[int]:
        """Local. Ranks of all tasks, in the order of the tasks, each once."""
        return list(dict.fromkeys(self._members[task].rank for task in self._spec.tasks()))

    def announce(self, state: TaskState.State) -> None:
        """Local. Tell every other task what this one does now."""
        self._members[self._task].state = state
        self._tell(state, self.ranks())

    def all_over(self) -> bool:
        """Local. Whether nobody needs this task any more.

        At least one other task has closed or left, and the rest wait themselves or are evaluators.
        """
        others = [(task, m) for task, m in self._members.items() if m.rank != self._rank]
        gone = [m.state == TaskState.CLOSED or m.rank in self._left for _, m in others]
        idle = (m.state == TaskState.JOINING or task[0] == "evaluator" for task, m in others)
        return any(gone) and all(g or i for g, i in zip(gone, idle, strict=True))

    def _tell(self, state: TaskState.State, ranks: list[int]) -> None:
        body = TaskState(
            job=self._task[0],
            task=self._task[1],
            state=state,
            cluster_digest=self._spec.digest(),
            rank=self._rank,
        ).SerializeToString()
        for rank in ranks:
            if rank != self._rank:
                address = Address(
                    self._endpoint.address.protocol, self._endpoint.address.host, rank
                )
                self._endpoint.notify(address, "cluster/State", body)

    def _on_state(self, request: Request) -> None:
        said = TaskState.FromString(request.body)
        task = (said.job, said.task)
        if said.state != TaskState.STARTED:
            # The last words of an earlier Server may arrive late; this one's come after its hello.
            if task in self._members:
                self._members[task].state = said.state
            return
        if said.cluster_digest != self._spec.digest():
            self._problem = (
                f"rank {said.rank} ({said.job} {said.task}) has another cluster spec than rank "
                f"{self._rank} ({self._task[0]} {self._task[1]}): all tasks must be given the same"
            )
            return
        known = self._members.get(task)
        if known is not None and known.rank != said.rank:
            self._problem = (
                f"ranks {known.rank} and {said.rank} both say that they are {said.job} "
                f"{said.task}: give each rank a task of its own"
            )
            return
        self._members[task] = _Member(said.state, said.rank)


def ranks_by_address(spec: ClusterSpec, hosts: tuple[str, ...]) -> dict[Task, int] | None:
    """Local. Rank of each task of a spec made by our resolvers, or None for any other spec.

    Args:
        spec: The cluster.
        hosts: Host name of each rank of the world.
    """
    ranks = {}
    for job, index in spec.tasks():
        host, _, port = spec.task_address(job, index).rpartition(":")
        if not port.isdigit() or int(port) >= len(hosts) or hosts[int(port)] != host:
            return None
        ranks[job, index] = spec.rank_of(job, index)
    return ranks
