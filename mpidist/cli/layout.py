"""Which job and task each rank of a launched world is. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_JOBS = ("ps", "worker", "data")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Layout:
    """The ranks of a job in order: each job's tasks in turn.

    Attributes:
        ranks: How many there are.
        jobs: Pairs of job name and number of tasks, in rank order; empty if none is named.
    """

    ranks: int
    jobs: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return ",".join(f"{name}={count}" for name, count in self.jobs)

    def task(self, rank: int) -> tuple[str, int] | None:
        """Local. The job and task of a rank.

        Args:
            rank: 0 to ``ranks - 1``.

        Returns:
            ``(job, task index)``, or None where the layout names no jobs.
        """
        first = 0
        for name, count in self.jobs:
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
    counts: dict[str, int | None], others: Sequence[tuple[str, int]], ranks: int | None
) -> Layout:
    """Local. Order the jobs and check the numbers.

    Args:
        counts: The numbers given for the jobs with options of their own; None for those not given.
        others: Further jobs, in order.
        ranks: The total, if given; ``worker`` takes what the other jobs leave of it.

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
    for name, number in [*jobs.items(), ("-n", ranks)]:
        if number is not None and number < 0:
            raise ValueError(f"{number} for {name} is negative; give 0 or more")
    given = {name: count for name, count in jobs.items() if count}
    total = sum(given.values())
    if ranks is None:
        ranks = total
    elif given and ranks != total:
        if "worker" in jobs or ranks < total:
            raise ValueError(f"-n {ranks} contradicts the {total} tasks of the jobs; leave out -n")
        given["worker"] = ranks - total
    if ranks == 0:
        raise ValueError("no rank to run; give --worker N, or -n N")
    if given and set(given) == {"ps"}:
        raise ValueError("no task uses the ps; add --worker N")
    order = [*FIRST_JOBS, *(name for name, _ in others if name not in FIRST_JOBS)]
    return Layout(ranks, tuple((name, given[name]) for name in order if name in given))
