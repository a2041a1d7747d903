"""What the ranks of a job leave in its folder, and which of them failed first.

=====================  ================================  ==========================================
File                   Written by                        When
=====================  ================================  ==========================================
``rank-<r>.json``      the runtime in the rank           MPI starts, and when job and task are known
``failure-<r>.json``   the runtime in the rank           before it ends the job for a reason
``metrics-<r>.json``   the runtime in the rank           every second, if it has a task that counts
``waits-<r>.json``     the runtime in the rank           every second, while it waits for long
``end.json``           ``mpidist run``                   the job is over
``exit-<r>.json``      :mod:`mpidist.launcher.keeper`         the rank has ended, well or not
=====================  ================================  ==========================================
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.launcher.layout import Layout

# Open MPI ends a rank whose connection to another breaks with a bare status, at once: perhaps even
# before it was seen that the other had been killed.
_OTHERS_FIRST_S = 1.0

_END = "end.json"
_RECORD = re.compile(r"(rank|failure|exit|metrics|waits)-(\d+)\.json")


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: Which.
        pid: Its process.
        host: Where it ran.
        reason: Why, in words.
        exit_code: The exit status a shell would show for it.
        time: When, in seconds since the epoch.
    """

    rank: int
    pid: int
    host: str
    reason: str
    exit_code: int
    time: float


def clear(folder: Path) -> None:
    """Local. Remove what an earlier job left in a folder.

    Args:
        folder: The job's folder.
    """
    for path in folder.iterdir():
        if _RECORD.fullmatch(path.name) or path.name == _END:
            path.unlink()


def write_end(folder: Path, status: int) -> None:
    """Local. Say that the job is over: ranks that the launcher ends leave no records.

    Args:
        folder: The job's folder.
        status: Of the job.
    """
    part = folder / f"{_END}.new"
    part.write_text(json.dumps({"status": status}), encoding="utf-8")
    part.replace(folder / _END)


def is_over(folder: Path) -> bool:
    """Local. Whether ``mpidist run`` has said that the job is over."""
    return (folder / _END).exists()


def read(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Local. The records of one kind.

    Args:
        folder: The job's folder.
        kind: ``rank``, ``failure``, ``metrics``, ``waits`` or ``exit``.

    Returns:
        Rank to record. Files are replaced whole, so each is readable.
    """
    found = {}
    with contextlib.suppress(FileNotFoundError):  # the folder was removed, or is about to be
        for path in folder.iterdir():
            name = _RECORD.fullmatch(path.name)
            if name and name[1] == kind:
                found[int(name[2])] = json.loads(path.read_text(encoding="utf-8"))
    return found


def describe_signal(number: int) -> str:
    """Local. A signal in words.

    Args:
        number: The signal.

    Returns:
        For example ``signal 9 (SIGKILL)``.
    """
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def first_failure(folder: Path) -> Failure | None:
    """Local. The failure that came before the others.

    Args:
        folder: The job's folder.

    Returns:
        The failure, or None if no rank has failed by itself so far.
    """
    failures: dict[int, Failure] = {}
    unexplained: set[int] = set()
    for rank, record in read(folder, "exit").items():
        number, code = record["signal"], record["exit_code"]
        if record["asked"] or code == 0:
            continue
        reason = (
            f"exited with status {code}"
            if number is None
            else f"killed by {describe_signal(number)}"
        )
        status = code if number is None else 128 + number
        if number is None:
            unexplained.add(rank)
        failures[rank] = Failure(
            rank, record["pid"], record["host"], reason, status, record["time"]
        )
    for rank, record in read(folder, "failure").items():
        unexplained.discard(rank)
        failures[rank] = Failure(
            rank,
            record["pid"],
            record["host"],
            # The runtime's reason explains the status that the keeper saw a little later.
            record["reason"],
            record["exit_code"] or 1,
            record["time"],
        )

    def order(failure: Failure) -> float:
        return failure.time + _OTHERS_FIRST_S * (failure.rank in unexplained)

    return min(failures.values(), key=order, default=None)


def ended(folder: Path) -> list[int]:
    """Local. The ranks that have ended, well or not.

    Args:
        folder: The job's folder.

    Returns:
        The ranks, in no order.
    """
    try:
        names = [_RECORD.fullmatch(path.name) for path in folder.iterdir()]
    except FileNotFoundError:  # the folder was removed
        return []
    return [int(name[2]) for name in names if name and name[1] == "exit"]


def ended_well(folder: Path) -> list[int]:
    """Local. The ranks that have ended with status 0.

    Args:
        folder: The job's folder.

    Returns:
        The ranks in order.
    """
    exits = read(folder, "exit")
    return sorted(rank for rank, record in exits.items() if record["exit_code"] == 0)


def task_name(folder: Path, layout: Layout, rank: int) -> str:
    """Local. What people call a rank.

    Args:
        folder: The job's folder.
        layout: The jobs, which the rank's own record overrules.
        rank: The rank.

    Returns:
        ``worker 1``, or ``rank 3`` where no job is known.
    """
    record = read(folder, "rank").get(rank, {})
    if record.get("job") is not None and record.get("task") is not None:
        return f"{record['job']} {record['task']}"
    task = layout.task(rank)
    return f"rank {rank}" if task is None else f"{task[0]} {task[1]}"
