"""The job and task of each rank. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.config import PER_NODE

FIRST_JOBS = ("ps", "worker", "data")
"""Jobs that come first in the order of ranks, in this order."""
_MOST_RANKS = (1 << 31) - 1  # the largest int of MPI
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Layout:
    """The ranks of a job in order: the tasks of one job after those of another.

    Attributes:
        ranks: Number of ranks.
        jobs: Pairs of job name and number of tasks, in rank order; empty if no job is named. For
            ps, a rule can stand in place of the number, which only the ranks can follow.
    """

    ranks: int
    jobs: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        return ",".join(f"{name}={count}" for name, count in self.jobs)

    def task(self, rank: int) -> tuple[str, int] | None:
        """Return the job and task index of a rank; None if the layout does not tell them."""
        first = 0
        for name, count in self.jobs:
            if count == PER_NODE:
                return None
            if isinstance(count, str):  # colocated tasks have no ranks of their own
                continue
            if rank < first + count:
                return name, rank - first
            first += count
        return None


def parse_job(text: str) -> tuple[str, int]:
    """Parse a job name and a number of tasks, for example ``evaluator=1``.

    Raises:
        ValueError: The text has another form.
    """
    name, _, number = text.partition("=")
    if not _NAME.fullmatch(name) or not number.isascii() or not number.isdigit():
        raise ValueError(f"--job {text!r} is not of the form NAME=N, for example --job evaluator=1")
    return name, int(number)


def make_layout(
    counts: dict[str, int | None],
    others: Sequence[tuple[str, int]],
    ranks: int | None,
    rule: str | None = None,
) -> Layout:
    """Order the jobs, and check their numbers of tasks.

    Args:
        counts: Numbers of tasks of the jobs with options of their own; None where not given.
        others: Further jobs, in order.
        ranks: Number of ranks, if given. ``worker`` takes the ranks that other jobs leave.
        rule: Place of the ps tasks, instead of their number: ``"per_node"`` or ``"colocated"``.

    Raises:
        ValueError: There are no ranks, or the numbers contradict each other.
    """
    jobs = {name: counts[name] for name in FIRST_JOBS if counts.get(name) is not None}
    for name, count in others:
        if name in jobs:
            raise ValueError(f"the job {name!r} is given twice; give its number once")
        jobs[name] = count
    if rule is not None:
        _check_rule(rule, jobs, ranks)
    for name, number in [*jobs.items(), ("-n", ranks)]:
        if number is not None and number < 0:
            raise ValueError(f"{number} for {name} is negative; give 0 or more")
        if number is not None and number > _MOST_RANKS:
            raise ValueError(f"{number} for {name} is more than MPI can have, {_MOST_RANKS}")
    given = {name: count for name, count in jobs.items() if count}
    total = sum(given.values())
    if ranks is None:
        ranks = total
    elif (given or rule) and ranks != total:
        if "worker" in jobs or ranks < total:
            raise ValueError(f"-n {ranks} contradicts the {total} tasks of the jobs; leave out -n")
        given["worker"] = ranks - total
    if ranks == 0:
        raise ValueError("no rank to run; give --worker N, or -n N")
    if given and (set(given) == {"ps"} or (rule is not None and not set(given) - {"data"})):
        raise ValueError("the job has parameter servers and no workers; add --worker N")
    tasks: dict[str, int | str] = dict(given)
    if rule is not None:
        tasks["ps"] = rule
        if rule == PER_NODE:
            tasks["worker"] = -1
    order = [*FIRST_JOBS, *(name for name, _ in others if name not in FIRST_JOBS)]
    return Layout(ranks, tuple((name, tasks[name]) for name in order if name in tasks))


def check_nodes(layout: Layout, nodes: int) -> None:
    """Check that a ps on each node leaves ranks for workers.

    Args:
        layout: The ranks and their jobs.
        nodes: Number of nodes that have ranks.

    Raises:
        ValueError: The ps tasks and the other jobs take all ranks.
    """
    jobs = dict(layout.jobs)
    if jobs.get("ps") != PER_NODE:
        return
    least = nodes + sum(count for count in jobs.values() if isinstance(count, int) and count > 0)
    if layout.ranks <= least:
        raise ValueError(
            f"-n {layout.ranks} leaves no worker with a ps on each of {nodes} nodes: give -n "
            f"{least + 1} or more, or fewer nodes"
        )


def _check_rule(rule: str, jobs: dict[str, int | None], ranks: int | None) -> None:
    """Raise a ValueError if numbers of tasks contradict the rule for the ps tasks."""
    if "ps" in jobs:
        raise ValueError("the tasks of ps follow the nodes: leave out their number")
    if rule == PER_NODE:
        if ranks is None or "worker" in jobs:
            raise ValueError(
                "--ps-per-node does not know the number of nodes in advance: give the total number "
                "of ranks with -n and leave out --worker; the remaining ranks become workers"
            )
        least = 2 + sum(count or 0 for count in jobs.values())
        if ranks < least:
            raise ValueError(
                f"-n {ranks} is too small: one ps, one worker and the other jobs need at "
                f"least {least} ranks"
            )
