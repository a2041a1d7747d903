"""The tasks of a cluster on their ranks: who they are, what they do, and when all is over."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.errors import DeadlineExceededError, InvalidArgumentError
from mpidist.proto.mpidist_pb2 import TaskState
from mpidist.rpc import Address, Request, open_endpoint
from mpidist.runtime import World, exits, world

# No Server and no service has a number as high as this.
_MAILBOX_NUMBERS = 1 << 31

# A rank that is in another cluster, or could not start, may be about to come to this one.
_PATIENCE_S = 1.0


class Mailbox:
    """What the tasks of all ranks say of themselves to this rank, until a Server reads it.

    It lives as long as the rank: another task may start its next Server while this one is still in
    its last, and what it says then is for this one's next.

    Args:
        world: The MPI world.

    Attributes:
        endpoint: Receives it.
        said: What each rank has said, oldest first; whoever has read a message removes it.
        elsewhere: Ranks that are in a cluster without this one, with what they are there.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.endpoint = open_endpoint("mpi", self._number(world.rank))
        handlers = {"State": self._on_state, "Elsewhere": self._on_elsewhere}
        self.endpoint.register("cluster", handlers)
        self.said: defaultdict[int, deque[TaskState]] = defaultdict(deque)
        self.elsewhere: dict[int, TaskState] = {}

    def tell(self, rank: int, state: TaskState, member: bool = True) -> None:
        """Local. Tell another rank; whether it may be a task of the same cluster."""
        address = Address("mpi", self._world.hosts[rank], self._number(rank))
        method = "cluster/State" if member else "cluster/Elsewhere"
        self.endpoint.notify(address, method, state.SerializeToString())

    def receive(self) -> None:
        """Local. Take in what is here; whoever serves an endpoint of this rank brings it."""
        self.endpoint.handle_arrived()

    def catch_up(self) -> None:
        """Local. Take in all that has been said, also where nobody serves."""
        while self.endpoint.progress():
            pass
        self.receive()

    def _number(self, rank: int) -> int:
        size = self._world.size
        return _MAILBOX_NUMBERS // size * size + rank

    def _on_state(self, request: Request) -> None:
        state = TaskState.FromString(request.body)
        self.said[state.rank].append(state)

    def _on_elsewhere(self, request: Request) -> None:
        state = TaskState.FromString(request.body)
        self.elsewhere[state.rank] = state
        if state.state == TaskState.CLOSED:
            del self.elsewhere[state.rank]


@cache
def mailbox() -> Mailbox:
    """Local. The mailbox of this rank; MPI must have been started."""
    return Mailbox(world())


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

    Attributes:
        guests: Tasks that live in another's process.
    """

    def __init__(self, spec: ClusterSpec, task: Task) -> None:
        self.guests: frozenset[Task] = frozenset()
        self._spec = spec
        self._task = task
        self._rank = world().rank
        self._mailbox = mailbox()
        self._candidates: list[int] = []
        self._members: dict[Task, _Member] = {}
        self._gave_up: dict[int, TaskState] = {}  # by rank: those whose Server could not start

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
        self._candidates = candidates
        self._mailbox.catch_up()
        self._members[self._task] = _Member(TaskState.STARTED, self._rank)
        self._tell(TaskState.STARTED)
        expected = [task for task in self._spec.tasks() if task not in colocated]
        began = time.monotonic()

        def complete() -> bool:
            for rank in candidates:
                self._read_hellos(self._mailbox.said[rank])
            if all(task in self._members for task in expected):
                return True
            if time.monotonic() - began > _PATIENCE_S:
                self._check_others(len(expected))
            return False

        try:
            in_time = self._mailbox.endpoint.serve(complete, began + limit_s)
        except BaseException:
            self._tell(TaskState.CLOSED)
            raise
        if not in_time:
            self._tell(TaskState.CLOSED)
            missing = [task for task in expected if task not in self._members]
            # Who gave up a moment ago waited for the same tasks: those are the reason.
            gave_up = {(said.job, said.task) for said in self._gave_up.values()}
            missing = [task for task in missing if task not in gave_up] or missing
            names = ", ".join(f"{job} {index}" for job, index in missing)
            raise DeadlineExceededError(
                f"{self._task[0]} {self._task[1]} on rank {self._rank} waited {limit_s:g} s for "
                f"{names} to start: every task must start a Server of the same cluster "
                "(MPIDIST_START_TIMEOUT_S sets the limit)"
            )
        for task, host in colocated.items():
            self._members[task] = self._members[host]
        self.guests = frozenset(colocated)

    def rank_of(self, task: Task) -> int:
        """Local. Rank of a task."""
        return self._members[task].rank

    def ranks(self) -> list[int]:
        """Local. Ranks of all tasks, in the order of the tasks, each once."""
        return list(dict.fromkeys(self._members[task].rank for task in self._spec.tasks()))

    def announce(self, state: TaskState.State) -> None:
        """Local. Tell every other task what this one does now."""
        self._members[self._task].state = state
        self._tell(state, believes=state != TaskState.CLOSED)

    def all_over(self) -> bool:
        """Local. Whether nobody needs this task any more.

        At least one other task has closed or left, and the rest wait themselves or are evaluators.
        """
        self._mailbox.receive()
        others = [(task, m) for task, m in self._members.items() if m.rank != self._rank]
        for _, member in others:
            self._read_words(member)
        left = exits().left
        gone = [m.state == TaskState.CLOSED or m.rank in left for _, m in others]
        idle = (m.state == TaskState.JOINING or task[0] == "evaluator" for task, m in others)
        return any(gone) and all(g or i for g, i in zip(gone, idle, strict=True))

    def has_left(self, task: Task) -> bool:
        """Local. Whether a task has closed its Server, or its rank has left."""
        member = self._members[task]
        if member.rank != self._rank:
            self._mailbox.receive()
            self._read_words(member)
        return member.state == TaskState.CLOSED or member.rank in exits().left

    def _tell(self, state: TaskState.State, believes: bool = True) -> None:
        """Tell the ranks that may be tasks; the others, only that this one is in a cluster.

        Who leaves a cluster that has started believes in none any more.
        """
        said = TaskState(
            job=self._task[0],
            task=self._task[1],
            state=state,
            cluster_digest=self._spec.digest() if believes else b"",
            rank=self._rank,
        )
        candidates = set(self._candidates)
        for rank in range(world().size):
            if rank in candidates and rank != self._rank:
                self._mailbox.tell(rank, said)
            elif rank not in candidates and state != TaskState.JOINING:
                self._mailbox.tell(rank, said, member=False)

    def _read_hellos(self, words: deque[TaskState]) -> None:
        """Take in what a rank has said before this Server has started."""
        while words:
            said = words.popleft()
            task = (said.job, said.task)
            known = self._members.get(task)
            if said.state == TaskState.STARTED:
                self._gave_up.pop(said.rank, None)
                end = next((word for word in words if word.state == TaskState.CLOSED), None)
                if end is None:
                    self._check(said, known)
                    self._members[task] = _Member(said.state, said.rank)
                elif end.cluster_digest:
                    self._gave_up[said.rank] = said
            elif said.state == TaskState.CLOSED and known is not None and known.rank == said.rank:
                del self._members[task]
                if said.cluster_digest:
                    self._gave_up[said.rank] = said  # it may try again

    def _read_words(self, member: _Member) -> None:
        """Take in what a task says, up to its last word: what follows is of its next Server."""
        words = self._mailbox.said[member.rank]
        while words and member.state != TaskState.CLOSED:
            member.state = words.popleft().state

    def _check(self, said: TaskState, known: _Member | None) -> None:
        if said.cluster_digest != self._spec.digest():
            raise self._mismatch(said)
        if known is not None and known.rank != said.rank:
            raise InvalidArgumentError(
                f"ranks {known.rank} and {said.rank} both say that they are {said.job} "
                f"{said.task}: give each rank a task of its own; where all have the same "
                "TF_CONFIG, MPIClusterResolver or auto() tells tasks apart by their ranks"
            )

    def _check_others(self, needed: int) -> None:
        """Whether those who gave up agree, and so many ranks can come that each task has one."""
        for said in self._gave_up.values():
            self._check(said, self._members.get((said.job, said.task)))
        elsewhere = [rank for rank in self._candidates if rank in self._mailbox.elsewhere]
        if len(self._candidates) - len(elsewhere) < needed:
            raise self._mismatch(self._mailbox.elsewhere[elsewhere[0]])

    def _mismatch(self, said: TaskState) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"rank {said.rank} ({said.job} {said.task}) has another cluster spec than rank "
            f"{self._rank} ({self._task[0]} {self._task[1]}): all tasks must be given the same"
        )
