"""Placement: checks of the addresses of tasks, and the rank of each task. Pure."""

from __future__ import annotations

import re
from collections import defaultdict

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
        launched: Whether this process is a rank of an MPI world, with a protocol for one process.

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


def check_ranks(spec: ClusterSpec, task: Task, rank: int, size: int) -> None:
    """Check that the world has a rank for each task of a cluster.

    Args:
        spec: The cluster, with addresses that are not ``<host>:<rank>``.
        task: The task of this rank.
        rank: This rank.
        size: Number of ranks of the world.

    Raises:
        FailedPreconditionError: There are fewer ranks than tasks.
    """
    tasks = len(spec.tasks())
    if tasks > size:
        raise FailedPreconditionError(
            f"{task[0]} {task[1]} on rank {rank} cannot start: the cluster has {tasks} tasks, and "
            f"the world has {size} ranks. Each task needs a rank of its own, unless all addresses "
            f"are <host>:<rank> of this world: start the script with  {_command(spec)}"
        )


def ranks_by_address(spec: ClusterSpec, hosts: tuple[str, ...]) -> dict[Task, int] | None:
    """Return the rank of each task if all addresses are ``<host>:<rank>`` of the world, or None.

    Args:
        spec: The cluster, with checked addresses.
        hosts: Host name of each rank of the world.
    """
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
