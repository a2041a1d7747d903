"""The jobs, the ranks and the script of a command line, for ``mpidist run`` and ``sbatch``."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass

from mpidist.config import COLOCATED, PER_NODE

_FIRST_JOBS = ("ps", "worker", "data")  # jobs that come first in the order of ranks
_MOST_RANKS = (1 << 31) - 1  # the largest int of MPI
_JOB = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*)=([0-9]+)")


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


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name jobs and numbers of tasks to a command."""
    for name in _FIRST_JOBS:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"tasks of the job {name}")
    rule = parser.add_mutually_exclusive_group()
    rule.add_argument(
        "--ps-per-node", action="store_const", dest="rule", const=PER_NODE,
        help="the first rank of each node is a task of ps; the others share memory with it",
    )  # fmt: skip
    rule.add_argument(
        "--colocate-ps", action="store_const", dest="rule", const=COLOCATED,
        help="the first rank of each node has a task of ps besides its own",
    )  # fmt: skip
    parser.add_argument(
        "--job", action="append", default=[], metavar="NAME=N",
        help="tasks of another job; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "-n", "-np", type=int, dest="ranks", metavar="N",
        help="ranks in all; worker takes the ranks that other jobs leave",
    )  # fmt: skip


def layout_of(namespace: argparse.Namespace, nodes: int = 1) -> Layout:
    """Order the jobs that the options describe, and check their numbers of tasks.

    Args:
        namespace: The options of :func:`add_job_options`. ``worker`` takes the ranks that other
            jobs leave.
        nodes: The least number of nodes that have ranks.

    Raises:
        ValueError: There are no ranks, or the numbers contradict each other.
    """
    ranks, rule = namespace.ranks, namespace.rule
    given = {name: getattr(namespace, name) for name in _FIRST_JOBS}
    jobs = {name: count for name, count in given.items() if count is not None}
    for text in namespace.job:
        matched = _JOB.fullmatch(text)
        if matched is None:
            raise ValueError(
                f"--job {text!r} is not of the form NAME=N, for example --job evaluator=1"
            )
        if matched[1] in jobs:
            raise ValueError(f"the job {matched[1]!r} is given twice; give its number once")
        jobs[matched[1]] = int(matched[2])
    for name, number in [*jobs.items(), ("-n", ranks)]:
        if number is not None and number < 0:
            raise ValueError(f"{number} for {name} is negative; give 0 or more")
        if number is not None and number > _MOST_RANKS:
            raise ValueError(f"{number} for {name} is more than MPI can have, {_MOST_RANKS}")
    if rule is not None and "ps" in jobs:
        raise ValueError("the tasks of ps follow the nodes: leave out their number")
    if rule == PER_NODE and (ranks is None or "worker" in jobs):
        raise ValueError(
            "--ps-per-node does not know the number of nodes in advance: give the total number "
            "of ranks with -n and leave out --worker; the remaining ranks become workers"
        )
    tasks: dict[str, int | str] = {name: count for name, count in jobs.items() if count}
    total = sum(jobs.values())
    if ranks is None:
        ranks = total
    elif (tasks or rule) and ranks != total:
        if "worker" in jobs or ranks < total:
            raise ValueError(f"-n {ranks} contradicts the {total} tasks of the jobs; leave out -n")
        tasks["worker"] = ranks - total
    if ranks == 0:
        raise ValueError("no rank to run; give --worker N, or -n N")
    if rule == PER_NODE:
        if ranks <= nodes + total:
            where, fewer = (f"of {nodes} nodes", ", or fewer nodes") if nodes > 1 else ("node", "")
            raise ValueError(
                f"-n {ranks} leaves no worker with a ps on each {where}: give -n "
                f"{nodes + total + 1} or more{fewer}"
            )
        tasks["worker"] = -1
    if rule is not None:
        tasks["ps"] = rule
    if "ps" in tasks and not tasks.keys() - ({"ps", "data"} if rule else {"ps"}):
        raise ValueError("the job has parameter servers and no workers; add --worker N")
    order = dict.fromkeys((*_FIRST_JOBS, *jobs))
    return Layout(ranks, tuple((name, tasks[name]) for name in order if name in tasks))


def job_words(namespace: argparse.Namespace) -> list[str]:
    """Return the options of :func:`add_job_options` as words of a command line."""
    given = [(f"--{name}", getattr(namespace, name)) for name in _FIRST_JOBS]
    given += [("--job", text) for text in namespace.job]
    given += [("-n", namespace.ranks)]
    words = [str(word) for pair in given if pair[1] is not None for word in pair]
    rules = {PER_NODE: ["--ps-per-node"], COLOCATED: ["--colocate-ps"]}
    return words + rules.get(namespace.rule, [])


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add ``[-m] script [args ...]`` to a command."""
    parser.add_argument(
        "-m", action="store_true", dest="module",
        help="the script is the name of a module, which runs as under python -m",
    )  # fmt: skip
    parser.add_argument("script", help="a Python script, or a folder or zip file with __main__.py")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def script_words(namespace: argparse.Namespace) -> list[str]:
    """Return ``-m``, the script and its arguments as words of a command line.

    A script whose name begins with a dash gets ``./`` before it, so that no command takes it for
    an option.

    Raises:
        ValueError: No script or module is named, or the script is missing.
    """
    script = namespace.script
    if not script:
        kind = "module" if namespace.module else "script"
        raise ValueError(f"the name of the {kind} is empty; give one")
    if namespace.module:
        return ["-m", script, *namespace.args]
    if not os.path.exists(script):
        raise ValueError(f"no script {script!r} here; give the path of a Python file")
    return [f"./{script}" if script.startswith("-") else script, *namespace.args]
