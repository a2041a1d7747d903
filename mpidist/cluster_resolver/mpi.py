"""Tasks from the ranks of the MPI world itself."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.config import config
from mpidist.runtime import launched, world

logger = logging.getLogger(__name__)


class MPIClusterResolver(ClusterResolver):
    """Gives the ranks of the world to jobs, in rank order.

    The layout that ``mpidist run`` was given wins over ``jobs``; a difference is logged. In a
    plain process task 0 of every job lives in it, and the script is a worker.

    Args:
        jobs: Number of tasks of each job, in the order of their ranks; -1, for one job at most,
            takes the ranks that remain.
        rpc_layer: Protocol of the addresses; by default ``"mpi"``, in a plain process
            ``"inproc"``.

    Raises:
        ValueError: A count is neither -1 nor positive or zero, or there is no job.
    """

    def __init__(self, jobs: Mapping[str, int] | None = None, rpc_layer: str | None = None) -> None:
        asked = dict({"worker": -1} if jobs is None else jobs)
        if not any(asked.values()):
            raise ValueError(f"the cluster needs a job with a task: {asked}")
        if min(asked.values()) < -1 or list(asked.values()).count(-1) > 1:
            raise ValueError(f"job counts must be 0 or more, with -1 for one job at most: {asked}")
        given = _parse_layout(config.jobs) if config.jobs is not None else None
        if given is not None and jobs is not None and not _same(asked, given):
            logger.info("the launcher's job layout %s replaces the script's %s", given, asked)
        layout = asked if given is None else given
        self._jobs = {job: count for job, count in layout.items() if count}
        self.rpc_layer = rpc_layer or ("mpi" if launched() else "inproc")
        self.task_type, self.task_id = self.cluster_spec().task_of(_rank())

    def cluster_spec(self) -> ClusterSpec:
        """Collective at first, since it may start MPI. The cluster; addresses are <host>:<rank>.

        Raises:
            ValueError: The jobs do not fit the number of ranks.
        """
        if launched():
            return ClusterSpec.from_counts(self._jobs, world().hosts)
        address = f"{socket.gethostname()}:0"
        return ClusterSpec({job: [address] for job in self._jobs})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Local. Address of a task, ``mpi://<host>:<rank>``; see :class:`ClusterResolver`.

        Raises:
            ValueError: There is no such task.
        """
        return self._task_address(task_type, task_id, rpc_layer) or ""


def _rank() -> int:
    return world().rank if launched() else 0


def _parse_layout(text: str) -> dict[str, int]:
    """The job layout of MPIDIST_JOBS: ``ps=1,worker=2``."""
    jobs = {}
    for item in text.split(","):
        name, equals, count = item.partition("=")
        if not equals or not name or not count.isdigit():
            raise ValueError(f"MPIDIST_JOBS={text!r} is not of the form ps=1,worker=2")
        jobs[name] = int(count)
    return jobs


def _same(asked: Mapping[str, int], given: Mapping[str, int]) -> bool:
    total = sum(given.values())
    named = sum(count for count in asked.values() if count > 0)
    filled = {job: total - named if count == -1 else count for job, count in asked.items()}
    return {j: c for j, c in filled.items() if c} == {j: c for j, c in given.items() if c}
