"""Tasks from the ranks of the MPI world itself."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from functools import cache

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.rank_layout import Ranks, assign, check_jobs
from mpidist.config import COLOCATED, PER_NODE, config
from mpidist.runtime import launched, world

logger = logging.getLogger(__name__)


class MPIClusterResolver(ClusterResolver):
    """Gives the ranks of the world to jobs, in rank order.

    The layout that ``mpidist run`` was given wins over ``jobs``; rank 0 logs a warning once if
    they differ. In a plain process task 0 of every job lives in it, and the script is a worker.

    Args:
        jobs: Tasks of each job: their number, in the order of the ranks, -1, for one job at most,
            for those that remain; or their ranks, as ``range(2)`` or ``[3, 1]``; or ``"per_node"``,
            the first rank of each node, so that each ps shares memory with workers; or
            ``"colocated"``, likewise, but that rank has a task of another job too.
        rpc_layer: Protocol of the addresses; by default ``"mpi"``, in a plain process
            ``"inproc"``.

    Raises:
        ValueError: There is no task, a number or a rank is not possible, or a rule unknown.
        TypeError: The tasks of a job are none of these.
    """

    def __init__(
        self, jobs: Mapping[str, Ranks] | None = None, rpc_layer: str | None = None
    ) -> None:
        asked = check_jobs({"worker": -1} if jobs is None else jobs)
        given = _parse_layout(config.jobs) if config.jobs is not None else None
        self._jobs = asked if given is None else check_jobs(given)
        self.rpc_layer = rpc_layer or ("mpi" if launched() else "inproc")
        self.task_type, self.task_id = self.cluster_spec().task_of(_rank())
        if given is not None and jobs is not None and not _same(asked, given) and _rank() == 0:
            _warn_of_layout(str(given), str(asked))

    def cluster_spec(self) -> ClusterSpec:
        """Collective at first, since it may start MPI. The cluster; addresses are <host>:<rank>.

        Raises:
            ValueError: The jobs do not fit the number of ranks.
        """
        if launched():
            here = world()
            ranks = assign(self._jobs, here.nodes)
            return ClusterSpec({job: [f"{here.hosts[r]}:{r}" for r in ranks[job]] for job in ranks})
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


@cache
def _warn_of_layout(given: str, asked: str) -> None:
    logger.warning(
        "mpidist run gives the job layout %s, which replaces the script's jobs=%s: leave one of "
        "the two out",
        given,
        asked,
    )


def _rank() -> int:
    return world().rank if launched() else 0


def _parse_layout(text: str) -> dict[str, Ranks]:
    """The job layout of MPIDIST_JOBS: ``ps=1,worker=2``, or ``ps=per_node,worker=-1``."""
    jobs: dict[str, Ranks] = {}
    for item in text.split(","):
        name, _, tasks = item.partition("=")
        number = tasks.isascii() and tasks.removeprefix("-").isdigit()
        if not name or name in jobs or not (number or tasks in (PER_NODE, COLOCATED)):
            raise ValueError(f"MPIDIST_JOBS={text!r} is not of the form ps=1,worker=2")
        jobs[name] = int(tasks) if number else tasks
    return jobs


def _same(asked: Mapping[str, Ranks], given: Mapping[str, Ranks]) -> bool:
    """Whether both mean the same, as far as that can be told without the ranks."""
    numbers = {job: count for job, count in asked.items() if isinstance(count, int)}
    total = sum(count for count in given.values() if isinstance(count, int))
    named = sum(count for count in numbers.values() if count > 0)
    filled = {job: total - named if count == -1 else count for job, count in numbers.items()}
    return {**asked, **filled} == {job: tasks for job, tasks in given.items() if tasks}
