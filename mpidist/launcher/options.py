"""Options that ``mpidist run`` and ``mpidist sbatch`` share: the jobs, and the script."""

from __future__ import annotations

import argparse
import os

from mpidist.config import COLOCATED, PER_NODE
from mpidist.launcher.layout import FIRST_JOBS, Layout, make_layout, parse_job


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name jobs and numbers of tasks to a command."""
    for name in FIRST_JOBS:
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


def layout_of(namespace: argparse.Namespace) -> Layout:
    """Return the layout that the options describe.

    Raises:
        ValueError: The numbers contradict each other.
    """
    others = [parse_job(text) for text in namespace.job]
    counts = {name: getattr(namespace, name) for name in FIRST_JOBS}
    return make_layout(counts, others, namespace.ranks, namespace.rule)


def job_words(namespace: argparse.Namespace) -> list[str]:
    """Return the options of :func:`add_job_options` as words of a command line."""
    given = [(f"--{name}", getattr(namespace, name)) for name in FIRST_JOBS]
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


def check_script(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> None:
    """End the command with an error if no script or module is named, or the script is missing."""
    kind = "module" if namespace.module else "script"
    if not namespace.script:
        parser.error(f"the name of the {kind} is empty; give one")
    if not namespace.module and not os.path.exists(namespace.script):
        parser.error(f"no script {namespace.script!r} here; give the path of a Python file")


def script_words(namespace: argparse.Namespace) -> list[str]:
    """Return ``-m``, the script and its arguments as words of a command line.

    A script whose name begins with a dash gets ``./`` before it, so that no command takes it for
    an option.
    """
    script = namespace.script
    if namespace.module:
        return ["-m", script, *namespace.args]
    return [f"./{script}" if script.startswith("-") else script, *namespace.args]
