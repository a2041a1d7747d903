"""Resolver for the ranks of an MPI world."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from functools import cache

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.job_layout import (
    JobTasks,
    assign_ranks,
    check_jobs,
    parse_layout,
    same_layout,
)
from mpidist.config import config
from mpidist.mpi import launched, world

logger = logging.getLogger(__name__)


class MPIClusterResolver(ClusterResolver):
    """Resolver that assigns the ranks of the world to jobs, in rank order.

    The layout of ``mpidist run`` overrides ``jobs``. If the numbers of tasks differ, rank 0 logs
    this once at level INFO. If a job is missing, rank 0 logs a warning. In a plain process task 0
    of every job is in this process, and the script is a worker.

    Args:
        jobs: Tasks of each job. A number counts tasks, in rank order; one job may have -1, for the
            remaining ranks. ``range(2)`` or ``[3, 1]`` are the ranks of the tasks. ``"per_node"``
            is the first rank of each node, so that each ps shares memory with workers.
            ``"colocated"`` is the same rank, which also has a task of another job.
        rpc_layer: Protocol of the addresses; by default ``"mpi"``, or ``"inproc"`` in a plain
            process.

    Raises:
        InvalidArgumentError: There is no task, a number or a rank is not possible, or a rule is
            unknown; also a ValueError.
        TypeError: The tasks of a job have another type.

    Example:
        >>> from mpidist.cluster_resolver import MPIClusterResolver
        >>> resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
        >>> resolver.task_type, resolver.task_id
        ('worker', 0)
        >>> resolver.cluster_spec().jobs
        ['ps', 'worker']
    """

    def __init__(
        self, jobs: Mapping[str, JobTasks] | None = None, rpc_layer: str | None = None
    ) -> None:
        asked = check_jobs({"worker": -1} if jobs is None else jobs)
        given = parse_layout(config.jobs) if config.jobs is not None else None
        self._jobs = asked if given is None else check_jobs(given)
        self.rpc_layer = rpc_layer or ("mpi" if launched() else "inproc")
        rank = world().rank if launched() else 0
        self.task_type, self.task_id = self.cluster_spec().task_of(rank)
        if given is not None and jobs is not None and rank == 0 and not same_layout(asked, given):
            level = logging.INFO if set(asked) <= set(given) else logging.WARNING
            _report_layout(level, str(given), str(asked))

    def cluster_spec(self) -> ClusterSpec:
        """Return the current cluster, with addresses ``<host>:<rank>``.

        The first call may start MPI, which is collective.

        Raises:
            InvalidArgumentError: The jobs do not match the number of ranks; also a ValueError.
        """
        if launched():
            here = world()
            ranks = assign_ranks(self._jobs, here.nodes)
            return ClusterSpec({job: [f"{here.hosts[r]}:{r}" for r in ranks[job]] for job in ranks})
        address = f"{socket.gethostname()}:0"
        return ClusterSpec({job: [address] for job in self._jobs})


@cache
def _report_layout(level: int, given: str, asked: str) -> None:
    text = "mpidist run gives the job layout %s, which replaces the script's jobs=%s"
    logger.log(level, text, given, asked)
