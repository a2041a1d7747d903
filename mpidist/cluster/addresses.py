"""Whether the tasks of a cluster can be where their addresses say. Pure."""

from __future__ import annotations

import re
from collections import defaultdict

from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.errors import FailedPreconditionError, InvalidArgumentError

_ADDRESS = re.compile(r"([^\s,]+):([0-9]{1,9})")
# Jobs that have an option of their own in the launcher.
_JOB_OPTIONS = ("ps", "worker", "data")


def check_addresses(spec: ClusterSpec) -> None:
    """Local. Whether each task has an address of the right form, and one of its own in its job.

    Args:
        spec: The cluster.

    Raises:
        InvalidArgumentError: One has not; the message names the tasks and the address.
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


def check_alone(spec: ClusterSpec, task: Task, *, launched: bool) -> None:
    """Local. Whether all tasks can live in one process.

    Args:
        spec: The cluster.
        task: That of the process.
        launched: Whether it is one of several, and only the protocol has it stand alone.

    Raises:
        FailedPreconditionError: Some have other addresses.
    """
    own = spec.task_address(*task)
    elsewhere = [t for t in spec.tasks() if spec.task_address(*t) != own]
    if elsewhere and launched:
        raise FailedPreconditionError(
            f"the cluster has {len(elsewhere) + 1} tasks, and this protocol is for those of one "
            "process: leave it out, or give 'mpi'"
        )
    if elsewhere:
        raise FailedPreconditionError(
            f"the cluster has {len(elsewhere) + 1} tasks, and this is a plain process: start "
            f"the script with  {_command(spec)}  and have MPIClusterResolver or auto() say "
            "which task each rank is"
        )


def check_ranks(spec: ClusterSpec, task: Task, rank: int, size: int) -> None:
    """Local. Whether there is a rank for each task, where addresses do not say which.

    Args:
        spec: The cluster.
        task: That of this rank.
        rank: This one, for the message.
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
    """Local. Rank of each task of a spec made by our resolvers, or None for any other spec.

    Args:
        spec: The cluster; its addresses have been checked.
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
    """The command that starts a script with a rank for each task."""
    counts = {job: spec.num_tasks(job) for job in spec.jobs}
    words = [
        f"--{job} {count}" if job in _JOB_OPTIONS else f"--job {job}={count}"
        for job, count in counts.items()
        if count
    ]
    return f"mpidist run {' '.join(words)} SCRIPT"
