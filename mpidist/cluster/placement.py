"""Placement: checks of the addresses of tasks, and the ranks of the tasks. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.errors import FailedPreconditionError, InvalidArgumentError

_ADDRESS = re.compile(r"([^\s,]+):([0-9]{1,9})")
# Jobs with an option of their own in `mpidist run`.
_JOB_OPTIONS = ("ps", "worker", "data")


def check_addresses(spec: ClusterSpec) -> None:
    """Check that each address is ``<host>:<port>``, and that no two tasks of a job share one.

    Raises:
        InvalidArgumentError: An address is not valid or not unique; the message names the tasks.
    """
    for job in spec.jobs:
        tasks = defaultdict(list)
        for index in spec.task_indices(job):
            address = spec.task_address(job, index)
            parts = _ADDRESS.fullmatch(address)
            if parts is None:
                raise InvalidArgumentError(
                    f"the address {address!r} of {job} {index} has no host or no port: give each "
                    "task <host>:<port>"
                )
            tasks[parts[1], int(parts[2])].append(index)
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
        FailedPreconditionError: The addresses put the task on another rank, or there are fewer
            ranks than tasks.
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
    own = [each for each in colocated if by_address[each] == rank]
    return Placement(sorted(set(by_address.values())), [task, *own], colocated)


def _ranks_by_address(spec: ClusterSpec, hosts: tuple[str, ...]) -> dict[Task, int] | None:
    """Return the rank of each task if all addresses are ``<host>:<rank>`` of the world, or None."""
    ranks = {}
    for task in spec.tasks():
        host, _, port = spec.task_address(*task).rpartition(":")
        rank = int(port)
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
