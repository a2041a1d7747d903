"""The options of commands that say which tasks a job has."""

from __future__ import annotations

import argparse

from mpidist.config import COLOCATED, PER_NODE
from mpidist.launcher.layout import FIRST_JOBS, Layout, make_layout, parse_job


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Local. Add them to a command.

    Args:
        parser: Of the command.
    """
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
        "--job",
        action="append",
        default=[],
        metavar="NAME=N",
        help="tasks of another job; may be repeated",
    )
    parser.add_argument(
        "-n",
        "-np",
        type=int,
        dest="ranks",
        metavar="N",
        help="ranks in all; worker takes what other jobs leave",
    )


def layout_of(namespace: argparse.Namespace) -> Layout:
    """Local. The layout that a command line asks for; ValueError if it is none."""
    others = [parse_job(text) for text in namespace.job]
    counts = {name: getattr(namespace, name) for name in FIRST_JOBS}
    return make_layout(counts, others, namespace.ranks, namespace.rule)


def layout_words(namespace: argparse.Namespace) -> list[str]:
    """Local. The same options again, as words of a command line."""
    given = [(f"--{name}", getattr(namespace, name)) for name in FIRST_JOBS]
    given += [("--job", text) for text in namespace.job]
    given += [("-n", namespace.ranks)]
    words = [str(word) for pair in given if pair[1] is not None for word in pair]
    rules = {PER_NODE: ["--ps-per-node"], COLOCATED: ["--colocate-ps"]}
    return words + rules.get(namespace.rule, [])
