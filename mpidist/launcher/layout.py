"""Which job and task each rank of a launched world is. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.config import PER_NODE

FIRST_JOBS = ("ps", "worker", "data")
_MOST_RANKS = (1 << 31) - 1  # what fits MPI's int
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Layout:
    """The ranks of a job in order: each job's tasks in turn.

    Attributes:
        ranks: How many there are.
        jobs: Pairs of job name and number of tasks, in rank order; empty if none is named. For the
            job ps, the number may be the name of a rule, which only the ranks can follow.
    """

    ranks: int
    jobs: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        return ",".join(f"{name}={count}" for name, count in self.jobs)

    def task(self, rank: int) -> tuple[str, int] | None:
        """Local. The job and task of a rank.

        Args:
            rank: 0 to ``ranks - 1``.

        Returns:
            ``(job, task index)``, or None where the layout names no jobs, or leaves them to the
            ranks.
        """
        first = 0
        for name, count in self.jobs:
            if count == PER_NODE:
                return None
            if isinstance(count, str):  # it has no ranks of its own
                continue
            if rank < first + count:
                return name, rank - first
            first += count
        return None


def parse_job(text: str) -> tuple[str, int]:
    """Local. Read one ``NAME=N``.

    Args:
        text: For example ``evaluator=1``.

    Returns:
        The name and the number.

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
    """Local. Order the jobs and check the numbers.

    Args:
        counts: The numbers given for the jobs with options of their own; None for those not given.
        others: Further jobs, in order.
        ranks: The total, if given; ``worker`` takes what the other jobs leave of it.
        rule: How ps tasks follow nodes, in place of their number: ``"per_node"`` or
            ``"colocated"``.

    Returns:
        The layout.

    Raises:
        ValueError: The numbers make no job, or contradict each other; the message says what to do.
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
    """Local. Whether a layout leaves ranks for workers on that many nodes.

    Args:
        layout: The ranks and their jobs.
        nodes: How many nodes have ranks.

    Raises:
        ValueError: A ps on each node, and the other jobs, take all ranks.
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
    """ValueError if numbers of tasks do not go with ps tasks that follow the nodes."""
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
