"""Job layouts: the number of tasks of each job, and the ranks of the tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from operator import index
from typing import Any

from mpidist.config import COLOCATED, PER_NODE
from mpidist.errors import InvalidArgumentError
from mpidist.host_list import is_number

JobTasks = int | str | Sequence[int]
"""The tasks of a job: a count, with -1 for the remaining ranks; ranks; or a rule by node."""


def parse_layout(text: str) -> dict[str, JobTasks]:
    """Return the layout that ``MPIDIST_JOBS`` describes.

    Args:
        text: For example ``ps=1,worker=2`` or ``ps=per_node,worker=-1``.

    Raises:
        InvalidArgumentError: The text has another form.
    """
    jobs: dict[str, JobTasks] = {}
    for item in text.split(","):
        name, _, tasks = item.partition("=")
        is_count = is_number(tasks.removeprefix("-"))
        if not name or name in jobs or not (is_count or tasks in (PER_NODE, COLOCATED)):
            raise InvalidArgumentError(f"MPIDIST_JOBS={text!r} is not of the form ps=1,worker=2")
        jobs[name] = int(tasks) if is_count else tasks
    return jobs


def check_jobs(jobs: Mapping[str, JobTasks]) -> dict[str, JobTasks]:
    """Return the jobs that have tasks.

    Args:
        jobs: The tasks of each job.

    Raises:
        InvalidArgumentError: There is no task, a count is below -1, several counts are -1, a rule
            is unknown, or ranks are negative or repeat.
        TypeError: The tasks of a job have another type.
    """
    if not isinstance(jobs, Mapping):
        raise TypeError(f"jobs is a dict of names to tasks, not {jobs!r}")
    tasks = {job: _as_tasks(job, value) for job, value in jobs.items()}
    counts = [value for value in tasks.values() if isinstance(value, int)]
    if min(counts, default=0) < -1 or counts.count(-1) > 1:
        raise InvalidArgumentError(
            f"job counts must be 0 or more, with -1 for one job at most: {dict(jobs)}"
        )
    for job, value in tasks.items():
        if isinstance(value, str):
            if value not in (PER_NODE, COLOCATED):
                raise InvalidArgumentError(
                    f"{job} is {value!r}; the rules are {PER_NODE!r}, {COLOCATED!r}"
                )
        elif not isinstance(value, int) and (len(set(value)) < len(value) or min([*value, 0]) < 0):
            raise InvalidArgumentError(f"the ranks of {job} are negative, or repeat: {value}")
    kept: dict[str, JobTasks] = {job: value for job, value in tasks.items() if value}
    if not kept:
        raise InvalidArgumentError(f"the cluster needs a job with a task: {dict(jobs)}")
    return kept


def check_counts(jobs: Mapping[str, JobTasks]) -> dict[str, JobTasks]:
    """Return the jobs that have tasks, and check that all are given by counts.

    Raises:
        InvalidArgumentError: See :func:`check_jobs`.
        TypeError: See :func:`check_jobs`; also for ranks and rules.
    """
    checked = check_jobs(jobs)
    for job, tasks in checked.items():
        if not isinstance(tasks, int):
            raise TypeError(
                f"{job} needs a number of tasks, not {jobs[job]!r}: ranks and rules are for "
                "MPIClusterResolver"
            )
    return checked


def assign_ranks(jobs: Mapping[str, JobTasks], nodes: Sequence[int]) -> dict[str, list[int]]:
    """Return the rank of each task, by job and index.

    Ranks given by number, and the first rank of each node for ``"per_node"``, are assigned first.
    The counts share the remaining ranks, in the order of the jobs and of the ranks. A
    ``"colocated"`` task is on the first rank of each node, which another job gets, too.

    Args:
        jobs: The result of :func:`check_jobs`.
        nodes: Number of the node of each rank.

    Raises:
        InvalidArgumentError: A rank does not exist or has two jobs, or the counts do not match the
            ranks.
    """
    first_of_node = [nodes.index(node) for node in dict.fromkeys(nodes)]
    assigned: dict[str, list[int]] = {}
    taken: set[int] = set()
    for job, value in jobs.items():
        if isinstance(value, int):
            continue
        ranks = first_of_node if isinstance(value, str) else list(value)
        if max(ranks) >= len(nodes):
            raise InvalidArgumentError(
                f"{job} is to have rank {max(ranks)}, and there are {len(nodes)}"
            )
        if value != COLOCATED:
            if twice := taken.intersection(ranks):
                raise InvalidArgumentError(f"ranks {sorted(twice)} of {job} have another job")
            taken.update(ranks)
        assigned[job] = ranks
    counts = {job: value for job, value in jobs.items() if isinstance(value, int)}
    named = len(taken) + sum(count for count in counts.values() if count > 0)
    needed = named + list(counts.values()).count(-1)
    if needed > len(nodes):
        raise InvalidArgumentError(
            f"the jobs {dict(jobs)} need at least {needed} ranks, and there are {len(nodes)}: "
            "start more, or ask for fewer tasks"
        )
    if needed == named < len(nodes):
        raise InvalidArgumentError(
            f"the jobs {dict(jobs)} use {named} of {len(nodes)} ranks; give one job -1 to take "
            "the rest"
        )
    left = (rank for rank in range(len(nodes)) if rank not in taken)
    for job, count in counts.items():
        assigned[job] = list(islice(left, len(nodes) - named if count == -1 else count))
    return {job: assigned[job] for job in jobs}


def same_layout(asked: Mapping[str, JobTasks], given: Mapping[str, JobTasks]) -> bool:
    """Return whether the layouts of a script and of the launcher agree, as far as counts tell."""
    counts = {job: count for job, count in asked.items() if isinstance(count, int)}
    total = sum(count for count in given.values() if isinstance(count, int))
    named = sum(count for count in counts.values() if count > 0)
    filled = {job: total - named if count == -1 else count for job, count in counts.items()}
    return {**asked, **filled} == {job: tasks for job, tasks in given.items() if tasks}


def _as_tasks(job: str, value: Any) -> int | str | list[int]:
    """Return tasks with Python's numbers; raise TypeError if they have another type."""
    if isinstance(value, str):
        return value
    several = hasattr(value, "__len__")
    try:
        ranks = [index(rank) for rank in (value if several else [value])]
    except TypeError:
        ranks = None
    if ranks is None or isinstance(value, bool | bytes):
        raise TypeError(f"{job} needs a number of tasks, or their ranks, not {value!r}")
    return ranks if several else ranks[0]
