"""Membership: the ranks of the tasks of a cluster, and the states that the tasks announce."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache

from mpidist.cluster.spec import ClusterSpec, Task, split_address
from mpidist.config import config
from mpidist.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from mpidist.mpi import World, waiting_for, world
from mpidist.proto.mpidist_pb2 import TaskState
from mpidist.rpc import Address, Request, open_endpoint

logger = logging.getLogger(__name__)

# Jobs with an option of their own in `mpidist run`.
_JOB_OPTIONS = ("ps", "worker", "data")

# Endpoint numbers from here on. Servers and services have lower numbers.
_FIRST_NUMBER = 1 << 31

# A rank that is in another cluster, or that failed to start, may be about to join this one. The
# announcements of a rank may arrive after its leave note.
_PATIENCE_S = 1.0

# Period of the checks whether all tasks are in join().
_LOOK_S = 0.25


def check_addresses(spec: ClusterSpec) -> None:
    """Check that each address is ``<host>:<port>``, and that no two tasks of a job share one.

    Raises:
        InvalidArgumentError: An address is not valid or not unique; the message names the tasks.
    """
    for job in spec.jobs:
        tasks = defaultdict(list)
        for index in spec.task_indices(job):
            address = spec.task_address(job, index)
            try:
                tasks[split_address(address)].append(index)
            except ValueError:
                raise InvalidArgumentError(
                    f"the address {address!r} of {job} {index} has no host or no port: give each "
                    "task <host>:<port>"
                ) from None
        for indices in tasks.values():
            if len(indices) > 1:
                raise InvalidArgumentError(
                    f"tasks {indices} of job {job!r} have the same address "
                    f"{spec.task_address(job, indices[0])}: give each its own"
                )


def check_single_process(spec: ClusterSpec, task: Task, *, launched: bool) -> None:
    """Check that all tasks of a cluster can run in one process.

    Args:
        spec: The cluster.
        task: The task of this process.
        launched: Whether MPI launched this process although the protocol is in-process.

    Raises:
        FailedPreconditionError: A task has another address.
    """
    address = spec.task_address(*task)
    others = [t for t in spec.tasks() if spec.task_address(*t) != address]
    if others and launched:
        raise FailedPreconditionError(
            f"the cluster has {len(others) + 1} tasks, and this protocol is for tasks in one "
            "process: leave it out, or give 'mpi'"
        )
    if others:
        raise FailedPreconditionError(
            f"the cluster has {len(others) + 1} tasks, and this is a plain process: start "
            f"the script with  {_command(spec)}  and have MPIClusterResolver or auto() say "
            "which task each rank is"
        )


@dataclass(frozen=True)
class Placement:
    """The placement of the tasks of a cluster on the ranks of a world.

    Attributes:
        ranks: Ranks that may be tasks of the cluster, sorted.
        own_tasks: The tasks of this rank; the task of the script comes first.
        colocated: For each task in the process of another task, that other task.
    """

    ranks: list[int]
    own_tasks: list[Task]
    colocated: dict[Task, Task] = field(default_factory=dict)


def place_in_world(spec: ClusterSpec, task: Task, rank: int, hosts: tuple[str, ...]) -> Placement:
    """Return the placement of a cluster on the ranks of a world.

    If all addresses are ``<host>:<rank>`` of this world, they are the placement, and a rank may
    have several tasks. With other addresses each task may be on any rank, one task a rank.

    Args:
        spec: The cluster, with checked addresses.
        task: The task of this rank's script.
        rank: This rank.
        hosts: Host name of each rank of the world.

    Raises:
        FailedPreconditionError: The addresses put the task on another rank, or beside the task of
            the rank's script; or there are fewer ranks than tasks.
    """
    by_address = _ranks_by_address(spec, hosts)
    if by_address is None:
        tasks, size = len(spec.tasks()), len(hosts)
        if tasks > size:
            raise FailedPreconditionError(
                f"{task[0]} {task[1]} on rank {rank} cannot start: the cluster has {tasks} tasks, "
                f"and the world has {size} ranks. Each task needs a rank of its own, unless all "
                f"addresses are <host>:<rank> of this world: start the script with  "
                f"{_command(spec)}"
            )
        return Placement(list(range(size)), [task])
    if by_address[task] != rank:
        raise FailedPreconditionError(
            f"{task[0]} {task[1]} is rank {by_address[task]} of the cluster spec, and this is rank "
            f"{rank}: use the resolver's task_type and task_id"
        )
    hosting = {each: spec.task_of(number) for each, number in by_address.items()}
    colocated = {each: host for each, host in hosting.items() if host != each}
    if task in colocated:
        job, index = colocated[task]
        raise FailedPreconditionError(
            f"{task[0]} {task[1]} is on rank {rank} together with {job} {index}, which is the task "
            "of the script: use the resolver's task_type and task_id"
        )
    own = [each for each in colocated if by_address[each] == rank]
    return Placement(sorted(set(by_address.values())), [task, *own], colocated)


def _ranks_by_address(spec: ClusterSpec, hosts: tuple[str, ...]) -> dict[Task, int] | None:
    """Return the rank of each task if all addresses are ``<host>:<rank>`` of the world, or None."""
    ranks = {}
    for task in spec.tasks():
        host, rank = split_address(spec.task_address(*task))
        if rank >= len(hosts) or hosts[rank] != host:
            return None
        ranks[task] = rank
    return ranks


def _command(spec: ClusterSpec) -> str:
    """Return the command that starts a script with a rank for each task."""
    counts = {job: spec.num_tasks(job) for job in spec.jobs}
    words = [
        f"--{job} {count}" if job in _JOB_OPTIONS else f"--job {job}={count}"
        for job, count in counts.items()
        if count
    ]
    return f"mpidist run {' '.join(words)} SCRIPT"


class MembershipInbox:
    """The state announcements that this rank has received.

    The inbox lives as long as the rank. Another task may start its next Server before this rank has
    left the last one, and its announcements are then for this rank's next Server.

    Args:
        world: The MPI world.

    Attributes:
        endpoint: The endpoint that receives announcements. Any serving endpoint of the rank
            receives for it.
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


class Membership:
    """The state of each task of a cluster, as last announced.

    A task announces to all others that it has started, that it waits in ``join``, and that it has
    closed its Server.

    Args:
        spec: The cluster.
        task: This task.
        placement: The placement of the tasks on ranks.

    Attributes:
        placement: The placement.
    """

    def __init__(self, spec: ClusterSpec, task: Task, placement: Placement) -> None:
        self.placement = placement
        self._spec = spec
        self._task = task
        self._digest = spec.digest()
        self._rank = world().rank
        self._left = world().shutdown.left
        self._inbox = membership_inbox()
        # The last announcement of each rank. CLOSED stands for a Server that could not start.
        self._announced: dict[int, TaskState] = {}
        self._members: dict[Task, TaskState] = {}
        self._joined_since = self._next_look = time.monotonic()

    def rendezvous(self, limit_s: float) -> None:
        """Collective over the tasks. Announce the start of this task, and wait for all others.

        Args:
            limit_s: Seconds to wait.

        Raises:
            DeadlineExceededError: Tasks are missing; the message names them.
            InvalidArgumentError: A task has another cluster spec; the message names it.
            UnavailableError: The script of a rank has ended without a Server.
        """
        # The end of a failed start may have arrived behind the start, so read all announcements.
        while self._inbox.endpoint.progress():
            pass
        self._inbox.endpoint.handle_arrived()
        self._announced[self._rank] = self._announce(TaskState.STARTED)
        began, since = time.monotonic(), time.time()
        waits = ExitStack()
        awaited: list[Task] = []

        def complete() -> bool:
            nonlocal awaited
            self._read_starts()
            self._check(self._started())
            missing = self._missing()
            if missing and time.monotonic() - began > _PATIENCE_S:
                self._check_others()
                if missing != awaited:
                    awaited = missing
                    waits.close()
                    names = _listed(missing)
                    waits.enter_context(waiting_for(f"{', '.join(names)} to start", names, since))
            return not missing

        try:
            with waits:
                in_time = self._inbox.endpoint.serve(complete, began + limit_s)
        except BaseException:
            self._announce(TaskState.CLOSED)
            raise
        if not in_time:
            self._announce(TaskState.CLOSED)
            missing = self._missing()
            # Tasks that failed a moment ago waited for the tasks that are missing now. The latter
            # are the reason.
            failed = {(state.job, state.task) for state in self._announced.values()}
            missing = [task for task in missing if task not in failed] or missing
            raise DeadlineExceededError(
                f"{self._task[0]} {self._task[1]} on rank {self._rank} waited {limit_s:g} s for "
                f"{_names(missing)} to start: every task must start a Server of the same cluster "
                "(MPIDIST_START_TIMEOUT_S sets the limit)"
            )
        self._members = {(state.job, state.task): state for state in self._started()}
        for task, host in self.placement.colocated.items():
            self._members[task] = self._members[host]

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
        self._inbox.endpoint.handle_arrived()
        others = [(task, m) for task, m in self._members.items() if m.rank != self._rank]
        gone = {task for task, member in others if self._is_gone(member)}
        if not gone and time.monotonic() >= self._next_look:
            self._report_joins([member for _, member in others])
        return bool(gone) and all(
            member.state == TaskState.JOINING or task[0] == "evaluator" or task in gone
            for task, member in others
        )

    def _report_joins(self, others: Sequence[TaskState]) -> None:
        """Log one warning if all tasks have been in ``join`` for long, since none can end it."""
        now = time.monotonic()
        self._next_look = now + _LOOK_S
        if any(member.state != TaskState.JOINING for member in others):
            self._joined_since = now
        elif now - self._joined_since > config.stall_s:
            self._next_look = math.inf
            job, index = self._task
            logger.warning(
                "%s %d: all tasks of the cluster are in join(), so join() does not return before "
                "stop(); call join() on ps and data tasks only, and train on the workers",
                job,
                index,
            )

    def has_left(self, task: Task) -> bool:
        """Return whether a task has closed its Server, or its rank has left."""
        self._inbox.endpoint.handle_arrived()
        return self._is_gone(self._members[task])

    def _is_gone(self, member: TaskState) -> bool:
        states = self._inbox.states[member.rank]
        while states and member.state != TaskState.CLOSED:  # later ones are of its next Server
            member.state = states.popleft().state
        return member.state == TaskState.CLOSED or member.rank in self._left

    def _announce(self, state: TaskState.State, same_spec: bool = True) -> TaskState:
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
            cluster_digest=self._digest if same_spec else b"",
            rank=self._rank,
        )
        candidates = set(self.placement.ranks)
        for rank in range(world().size):
            if rank in candidates and rank != self._rank:
                self._inbox.send(rank, message, candidate=True)
            elif rank not in candidates and state != TaskState.JOINING:
                self._inbox.send(rank, message, candidate=False)
        return message

    def _read_starts(self) -> None:
        """Read the announcements that arrive before this Server has started."""
        for rank in self.placement.ranks:
            states = self._inbox.states[rank]
            while states:
                state = states.popleft()
                if state.state == TaskState.CLOSED and not state.cluster_digest:
                    self._announced.pop(rank, None)
                elif state.state == TaskState.STARTED or rank in self._announced:
                    self._announced[rank] = state

    def _started(self) -> list[TaskState]:
        return [state for state in self._announced.values() if state.state != TaskState.CLOSED]

    def _missing(self) -> list[Task]:
        started = {(state.job, state.task) for state in self._started()}
        started.update(self.placement.colocated)
        return [task for task in self._spec.tasks() if task not in started]

    def _check(self, states: Iterable[TaskState]) -> None:
        """Check that tasks have the same spec, and that each is on one rank."""
        ranks = {self._task: self._rank}
        for state in states:
            if state.cluster_digest != self._digest:
                raise self._mismatch(state)
            rank = ranks.setdefault((state.job, state.task), state.rank)
            if rank != state.rank:
                raise InvalidArgumentError(
                    f"ranks {rank} and {state.rank} both say that they are {state.job} "
                    f"{state.task}: give each rank a task of its own; where all have the same "
                    "TF_CONFIG, MPIClusterResolver or auto() tells tasks apart by their ranks"
                )

    def _check_others(self) -> None:
        """Check the failed tasks, and that enough ranks can still start."""
        self._check(self._announced.values())
        candidates, others = self.placement.ranks, self._inbox.other_clusters
        needed = len(self._spec.tasks()) - len(self.placement.colocated)
        elsewhere = [rank for rank in candidates if rank in others]
        if len(candidates) - len(elsewhere) < needed:
            raise self._mismatch(others[elsewhere[0]])
        started = {state.rank for state in self._started()}
        latest = time.monotonic() - _PATIENCE_S
        ended = [
            rank
            for rank in candidates
            if rank not in (*started, *elsewhere) and self._left.get(rank, latest) < latest
        ]
        if len(candidates) - len(elsewhere) - len(ended) < needed:
            raise UnavailableError(
                f"{self._task[0]} {self._task[1]} on rank {self._rank} waits for "
                f"{_names(self._missing())} to start, and the script of rank {ended[0]} has ended: "
                "every task must start a Server of the same cluster"
            )

    def _mismatch(self, state: TaskState) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"rank {state.rank} ({state.job} {state.task}) has another cluster spec than rank "
            f"{self._rank} ({self._task[0]} {self._task[1]}): all tasks must be given the same"
        )


def _names(tasks: Iterable[Task]) -> str:
    return ", ".join(_listed(tasks))


def _listed(tasks: Iterable[Task]) -> list[str]:
    return [f"{job} {index}" for job, index in tasks]
