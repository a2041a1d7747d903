"""Membership: the tasks of a cluster announce their state to each other, from start to end."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cache

from mpidist.cluster.placement import Placement
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.errors import DeadlineExceededError, InvalidArgumentError
from mpidist.mpi import World, world
from mpidist.proto.mpidist_pb2 import TaskState
from mpidist.rpc import Address, Request, open_endpoint

# Endpoint numbers from here on. Servers and services have lower numbers.
_FIRST_NUMBER = 1 << 31

# A rank that is in another cluster, or that failed to start, may be about to join this one.
_PATIENCE_S = 1.0


class MembershipInbox:
    """The state announcements that this rank has received.

    The inbox lives as long as the rank. Another task may start its next Server before this rank has
    left the last one, and its announcements are then for this rank's next Server.

    Args:
        world: The MPI world.

    Attributes:
        endpoint: The endpoint that receives announcements.
        states: Unread announcements of each rank, oldest first. The reader removes them.
        other_clusters: The task of each rank that is in a cluster without this rank.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.endpoint = open_endpoint("mpi", self._number(world.rank))
        handlers = {"State": self._on_state, "OtherCluster": self._on_other_cluster}
        self.endpoint.register("cluster", handlers)
        self.states: defaultdict[int, deque[TaskState]] = defaultdict(deque)
        self.other_clusters: dict[int, TaskState] = {}

    def send(self, rank: int, state: TaskState, *, candidate: bool) -> None:
        """Announce a state to another rank.

        Args:
            rank: The rank.
            state: The state of a task of this rank.
            candidate: Whether the rank may be a task of the same cluster.
        """
        address = Address("mpi", self._world.hosts[rank], self._number(rank))
        method = "cluster/State" if candidate else "cluster/OtherCluster"
        self.endpoint.notify(address, method, state.SerializeToString())

    def handle_arrived(self) -> None:
        """Read the announcements that have arrived. Any serving endpoint receives them."""
        self.endpoint.handle_arrived()

    def catch_up(self) -> None:
        """Poll for announcements and read them, even if no endpoint of this rank serves."""
        while self.endpoint.progress():
            pass
        self.handle_arrived()

    def _number(self, rank: int) -> int:
        size = self._world.size
        return _FIRST_NUMBER // size * size + rank

    def _on_state(self, request: Request) -> None:
        state = TaskState.FromString(request.body)
        self.states[state.rank].append(state)

    def _on_other_cluster(self, request: Request) -> None:
        state = TaskState.FromString(request.body)
        self.other_clusters[state.rank] = state
        if state.state == TaskState.CLOSED:
            del self.other_clusters[state.rank]


@cache
def membership_inbox() -> MembershipInbox:
    """Return the inbox of this rank; MPI must have been started."""
    return MembershipInbox(world())


@dataclass
class _Member:
    state: TaskState.State
    rank: int


class Membership:
    """The state of each task of a cluster, as last announced.

    A task announces to all others that it has started, that it waits in ``join``, and that it has
    closed its Server.

    Args:
        spec: The cluster.
        task: This task.

    Attributes:
        colocated: Tasks that live in the process of another task.
    """

    def __init__(self, spec: ClusterSpec, task: Task) -> None:
        self.colocated: frozenset[Task] = frozenset()
        self._spec = spec
        self._task = task
        self._rank = world().rank
        self._left = world().shutdown.left
        self._inbox = membership_inbox()
        self._candidates: list[int] = []
        self._members: dict[Task, _Member] = {}
        # Tasks whose Server could not start, by rank.
        self._failed: dict[int, TaskState] = {}

    def rendezvous(self, placement: Placement, limit_s: float) -> None:
        """Collective over the tasks. Announce the start of this task, and wait for all others.

        Args:
            placement: The placement of the tasks on ranks.
            limit_s: Seconds to wait.

        Raises:
            DeadlineExceededError: Tasks are missing; the message names them.
            InvalidArgumentError: A task has another cluster spec; the message names it.
        """
        self._candidates = placement.ranks
        self._inbox.catch_up()
        self._members[self._task] = _Member(TaskState.STARTED, self._rank)
        self._announce(TaskState.STARTED)
        expected = [task for task in self._spec.tasks() if task not in placement.colocated]
        began = time.monotonic()

        def complete() -> bool:
            for rank in placement.ranks:
                self._read_starts(self._inbox.states[rank])
            if all(task in self._members for task in expected):
                return True
            if time.monotonic() - began > _PATIENCE_S:
                self._check_others(len(expected))
            return False

        try:
            in_time = self._inbox.endpoint.serve(complete, began + limit_s)
        except BaseException:
            self._announce(TaskState.CLOSED)
            raise
        if not in_time:
            self._announce(TaskState.CLOSED)
            missing = [task for task in expected if task not in self._members]
            # Tasks that failed a moment ago waited for the tasks that are missing now. The latter
            # are the reason.
            failed = {(state.job, state.task) for state in self._failed.values()}
            missing = [task for task in missing if task not in failed] or missing
            names = ", ".join(f"{job} {index}" for job, index in missing)
            raise DeadlineExceededError(
                f"{self._task[0]} {self._task[1]} on rank {self._rank} waited {limit_s:g} s for "
                f"{names} to start: every task must start a Server of the same cluster "
                "(MPIDIST_START_TIMEOUT_S sets the limit)"
            )
        for task, host in placement.colocated.items():
            self._members[task] = self._members[host]
        self.colocated = frozenset(placement.colocated)

    def rank_of(self, task: Task) -> int:
        """Return the rank of a task."""
        return self._members[task].rank

    def ranks(self) -> list[int]:
        """Return the ranks of all tasks, in the order of the tasks, each rank once."""
        return list(dict.fromkeys(self._members[task].rank for task in self._spec.tasks()))

    def announce(self, state: TaskState.State) -> None:
        """Announce a new state of this task to all others."""
        self._members[self._task].state = state
        self._announce(state, same_spec=state != TaskState.CLOSED)

    def finished(self) -> bool:
        """Return whether the work of the cluster is done.

        At least one other task has closed or left, and all remaining tasks are in ``join`` or are
        evaluators.
        """
        self._inbox.handle_arrived()
        others = [(task, m) for task, m in self._members.items() if m.rank != self._rank]
        for _, member in others:
            self._read_states(member)
        gone = [m.state == TaskState.CLOSED or m.rank in self._left for _, m in others]
        idle = (m.state == TaskState.JOINING or task[0] == "evaluator" for task, m in others)
        return any(gone) and all(g or i for g, i in zip(gone, idle, strict=True))

    def has_left(self, task: Task) -> bool:
        """Return whether a task has closed its Server, or its rank has left."""
        member = self._members[task]
        if member.rank != self._rank:
            self._inbox.handle_arrived()
            self._read_states(member)
        return member.state == TaskState.CLOSED or member.rank in self._left

    def _announce(self, state: TaskState.State, same_spec: bool = True) -> None:
        """Send a state to all candidates. Other ranks learn only that this rank is in a cluster.

        Args:
            state: The state.
            same_spec: Whether to send the digest of the spec. A task that closes a started Server
                sends none, because its next Server may have another spec.
        """
        message = TaskState(
            job=self._task[0],
            task=self._task[1],
            state=state,
            cluster_digest=self._spec.digest() if same_spec else b"",
            rank=self._rank,
        )
        candidates = set(self._candidates)
        for rank in range(world().size):
            if rank in candidates and rank != self._rank:
                self._inbox.send(rank, message, candidate=True)
            elif rank not in candidates and state != TaskState.JOINING:
                self._inbox.send(rank, message, candidate=False)

    def _read_starts(self, states: deque[TaskState]) -> None:
        """Read the announcements that a rank has sent before this Server has started."""
        while states:
            state = states.popleft()
            task = (state.job, state.task)
            known = self._members.get(task)
            if state.state == TaskState.STARTED:
                self._failed.pop(state.rank, None)
                end = next((later for later in states if later.state == TaskState.CLOSED), None)
                if end is None:
                    self._check(state, known)
                    self._members[task] = _Member(state.state, state.rank)
                elif end.cluster_digest:
                    self._failed[state.rank] = state
            elif state.state == TaskState.CLOSED and known is not None and known.rank == state.rank:
                del self._members[task]
                if state.cluster_digest:
                    self._failed[state.rank] = state  # that task may try again

    def _read_states(self, member: _Member) -> None:
        """Read the announcements of a task, up to CLOSED. Later ones belong to its next Server."""
        states = self._inbox.states[member.rank]
        while states and member.state != TaskState.CLOSED:
            member.state = states.popleft().state

    def _check(self, state: TaskState, known: _Member | None) -> None:
        if state.cluster_digest != self._spec.digest():
            raise self._mismatch(state)
        if known is not None and known.rank != state.rank:
            raise InvalidArgumentError(
                f"ranks {known.rank} and {state.rank} both say that they are {state.job} "
                f"{state.task}: give each rank a task of its own; where all have the same "
                "TF_CONFIG, MPIClusterResolver or auto() tells tasks apart by their ranks"
            )

    def _check_others(self, needed: int) -> None:
        """Check the specs of failed tasks, and that enough ranks are in no other cluster."""
        for state in self._failed.values():
            self._check(state, self._members.get((state.job, state.task)))
        elsewhere = [rank for rank in self._candidates if rank in self._inbox.other_clusters]
        if len(self._candidates) - len(elsewhere) < needed:
            raise self._mismatch(self._inbox.other_clusters[elsewhere[0]])

    def _mismatch(self, state: TaskState) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"rank {state.rank} ({state.job} {state.task}) has another cluster spec than rank "
            f"{self._rank} ({self._task[0]} {self._task[1]}): all tasks must be given the same"
        )
