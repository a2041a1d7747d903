"""Which ranks are which tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from mpidist.cluster import ClusterSpec
from mpidist.config import COLOCATED, PER_NODE

Ranks = int | str | Sequence[int]
"""Tasks of a job: their number, -1 for the ranks that remain; their ranks; or one a node."""


def check_jobs(jobs: Mapping[str, Ranks]) -> dict[str, Ranks]:
    """Local. The jobs that have tasks.

    Args:
        jobs: Tasks of each job.

    Raises:
        ValueError: There is no task, a number is below -1, several are -1, a name of a rule is
            unknown, or ranks are negative or repeat.
        TypeError: Tasks are none of these.
    """
    if not isinstance(jobs, Mapping):
        raise TypeError(f"jobs is a dict of names to tasks, not {jobs!r}")
    tasks = {job: _tasks(job, value) for job, value in jobs.items()}
    numbers = [value for value in tasks.values() if isinstance(value, int)]
    if min(numbers, default=0) < -1 or numbers.count(-1) > 1:
        raise ValueError(f"job counts must be 0 or more, with -1 for one job at most: {dict(jobs)}")
    for job, value in tasks.items():
        if isinstance(value, str):
            if value not in (PER_NODE, COLOCATED):
                raise ValueError(f"{job} is {value!r}; the rules are {PER_NODE!r}, {COLOCATED!r}")
        elif not isinstance(value, int) and (len(set(value)) < len(value) or min([*value, 0]) < 0):
            raise ValueError(f"the ranks of {job} are negative, or repeat: {value}")
    kept: dict[str, Ranks] = {job: value for job, value in tasks.items() if value}
    if not kept:
        raise ValueError(f"the cluster needs a job with a task: {dict(jobs)}")
    return kept


def _tasks(job: str, value: Any) -> int | str | list[int]:
    """Numbers as Python's; TypeError if it is nothing that tells tasks."""
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


def assign(jobs: Mapping[str, Ranks], nodes: Sequence[int]) -> dict[str, list[int]]:
    """Local. The ranks of each job's tasks, by index.

    Ranks that are named, and the first rank of each node for ``"per_node"``, are taken first; the
    numbers share what remains, in the order of the jobs and of the ranks. ``"colocated"`` tasks are
    on the first rank of each node, too, but leave it to another job.

    Args:
        jobs: As :func:`check_jobs` gives them.
        nodes: Number of the node of each rank.

    Raises:
        ValueError: A rank is not there, has two jobs by name, or the numbers do not fit.
    """
    first_of_node = [nodes.index(node) for node in dict.fromkeys(nodes)]
    placed: dict[str, list[int]] = {}
    taken: set[int] = set()
    for job, value in jobs.items():
        if isinstance(value, int):
            continue
        ranks = first_of_node if isinstance(value, str) else list(value)
        if max(ranks) >= len(nodes):
            raise ValueError(f"{job} is to have rank {max(ranks)}, and there are {len(nodes)}")
        if value != COLOCATED:
            if taken & set(ranks):
                raise ValueError(f"ranks {sorted(taken & set(ranks))} of {job} have another job")
            taken |= set(ranks)
        placed[job] = ranks
    left = [rank for rank in range(len(nodes)) if rank not in taken]
    counts = {job: value for job, value in jobs.items() if isinstance(value, int)}
    if left and not counts:
        raise ValueError(f"ranks {left} have no job; give one job -1 to take them")
    if counts:
        shared = ClusterSpec.from_counts(counts, [""] * len(left))
        rest = iter(left)
        placed |= {job: [next(rest) for _ in range(shared.num_tasks(job))] for job in counts}
    return {job: placed[job] for job in jobs}
