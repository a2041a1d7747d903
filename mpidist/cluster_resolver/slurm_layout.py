"""Which host each task of a Slurm job step is on. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpidist.errors import InvalidArgumentError

_MOST_NODES = 1_000_000
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def parse_counts(text: str) -> list[int]:
    """Local. Numbers of tasks by node: ``"3(x2),1"`` is 3, 3, 1.

    Raises:
        InvalidArgumentError: It is nothing like that; also a ValueError.
    """
    counts: list[int] = []
    for item in text.split(","):
        matched = _COUNT.fullmatch(item.strip())
        if matched is None or len(item) > 20:
            raise InvalidArgumentError(f"{text!r} is no list of tasks by node, as 2(x3),1 is")
        counts += [int(matched[1])] * min(int(matched[2] or 1), _MOST_NODES)
        if len(counts) > _MOST_NODES or sum(counts) > _MOST_NODES:
            raise InvalidArgumentError(f"{text!r} has more than {_MOST_NODES} nodes or tasks")
    return counts


def lay_out(
    hosts: Sequence[str], counts: Sequence[int], distribution: str = "block", plane: int = 0
) -> tuple[str, ...]:
    """Local. Host of each task, by rank.

    Args:
        hosts: Of the step, in Slurm's order.
        counts: How many tasks each of them has.
        distribution: What ``srun --distribution`` was given, or says: its first part, before a
            colon or comma, tells how nodes are filled.
        plane: Tasks that go to a node at once, in the distribution ``plane``.

    Returns:
        The hosts: node by node for ``block``, in turns for ``cyclic`` and ``plane``.

    Raises:
        InvalidArgumentError: There are more or fewer counts than hosts, the distribution is
            another one, or nothing tells how many tasks are a plane.
    """
    if len(hosts) != len(counts):
        raise InvalidArgumentError(
            f"Slurm names {len(hosts)} nodes, but numbers of tasks for {len(counts)}"
        )
    kind, _, size = re.split("[:,]", distribution.strip().lower() or "block")[0].partition("=")
    plane = int(size) if size.isascii() and size.isdigit() else plane
    most = max(counts, default=0)
    at_once = {"block": most, "pack": most, "nopack": most, "*": most, "cyclic": 1, "plane": plane}
    if kind not in at_once:
        raise InvalidArgumentError(
            f"tasks distributed as {distribution!r} cannot be told apart here: start with "
            "srun --distribution=block, or use MPIClusterResolver"
        )
    if kind == "plane" and plane < 1:
        raise InvalidArgumentError("Slurm does not say how many tasks a plane has")
    step = max(at_once[kind], 1)
    return tuple(
        host
        for begin in range(0, most, step)
        for host, count in zip(hosts, counts, strict=True)
        for _ in range(min(count - begin, step))
    )
