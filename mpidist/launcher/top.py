"""``mpidist top``: what the tasks of a job are doing, from what they leave in its folder."""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidist.launcher import records

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MIB = 1 << 20
# A rank writes its numbers once a second.
_SILENT_S = 5.0
_LONGEST_S = 86400.0
_COLUMNS = (
    "task", "rank", "host", "pid", "state",
    "steps/s", "in MiB/s", "out MiB/s", "staleness", "queue", "waiting", "data wait", "busy",
)  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Local. Add the subcommand to the command line.

    Args:
        subparsers: What ``add_subparsers`` returned.
    """
    parser = subparsers.add_parser(
        "top",
        help="show what the tasks of a running job do",
        description="Show what the tasks of a running job do, until they have ended.",
        epilog="Steps of a ps are pushes. Staleness: how many changes of others a change had not "
        "seen, in the mean. Steps of a data task are elements. Waiting (of a data task: for "
        "readers), data wait (for elements of a data service) and busy: parts of the time.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        help="the job's --run-dir; without it the newest job that mpidist run has on this host",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table, of the means since the start, and end"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds; 1")
    parser.set_defaults(run=lambda namespace: _run(parser, namespace))


@dataclass(frozen=True)
class Snapshot:
    """What a job's folder says at one moment.

    Attributes:
        ranks: Records of the ranks, by rank.
        ends: Of those that have ended, likewise.
        failures: Of those that have said why they failed.
        over: Whether the launcher has said that the job is.
        times: When each rank wrote its numbers, in seconds since the epoch.
        tasks: Numbers by name, by rank and task.
    """

    ranks: dict[int, dict[str, object]]
    ends: dict[int, dict[str, object]]
    failures: dict[int, dict[str, object]]
    over: bool = False
    times: dict[int, float] = field(default_factory=dict)
    tasks: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Snapshot:
        """Local. Read a folder.

        Raises:
            OSError: It is not there, or cannot be read.
            ValueError: What is there was not written by ranks.
        """
        kind = ""
        folder.stat()  # where there is none, reading would find nothing
        try:
            ranks, ends, failures = (records.read(folder, k) for k in ("rank", "exit", "failure"))
            snapshot = cls(ranks, ends, failures, records.is_over(folder))
            for record in (*ranks.values(), *ends.values(), *failures.values()):
                _check(record)
            kind = "metrics"
            for rank, record in records.read(folder, kind).items():
                snapshot.times[rank] = float(record["time"])
                for task, values in record["tasks"].items():
                    snapshot.tasks[rank, task] = {name: float(n) for name, n in values.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"a file {kind}-<rank>.json" if kind else "a file"
            raise ValueError(f"{what} was not written by a rank ({error!r})") from None
        return snapshot

    def is_over(self) -> bool:
        """Local. Whether all ranks that there are have ended."""
        ended = self.ends.keys() | self.failures.keys()
        return self.over or (bool(self.ranks) and self.ranks.keys() <= ended)

    def is_abandoned(self) -> bool:
        """Local. Whether nothing of it is left on this host, where it was, though nobody said so.

        A rank may just have ended: whoever started it then says so soon.
        """
        ended = self.ends.keys() | self.failures.keys()
        return all(rank in ended or self._is_gone(rank) for rank in self.ranks)

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of a rank was on this host, and is not there any more."""
        about = self.ranks.get(rank, {})
        here = about.get("host") == socket.gethostname()
        return here and not Path(f"/proc/{about.get('pid')}").exists()

    def base_of_rates(self, last: Snapshot, base: Snapshot) -> Snapshot:
        """Local. Since when rates are: each rank's numbers before those that it has now.

        Args:
            last: The snapshot before this one.
            base: What that one's rates were taken from.
        """
        following = Snapshot(self.ranks, self.ends, self.failures, self.over)
        for rank, now in self.times.items():
            source = base if last.times.get(rank, now) == now else last
            if rank in source.times:
                following.times[rank] = source.times[rank]
                own = {key: values for key, values in source.tasks.items() if key[0] == rank}
                following.tasks.update(own)
        return following

    def rows(self, before: Snapshot | None, now: float) -> list[list[str]]:
        """Local. A row for each task.

        Args:
            before: Since when rates are; None: since the start.
            now: Seconds since the epoch.
        """
        tasks: list[tuple[int, str]] = sorted(self.tasks, key=lambda key: (key[1], key[0]))
        without = sorted(self.ranks.keys() - {rank for rank, _ in tasks})
        rows = [self._row(rank, task, before, now) for rank, task in tasks]
        return rows + [self._row(rank, self._name(rank), before, now) for rank in without]

    def _row(self, rank: int, task: str, before: Snapshot | None, now: float) -> list[str]:
        about = self.ranks.get(rank, {})
        who = [str(rank), str(about.get("host", "?")), str(about.get("pid", "?"))]
        state = self._state(rank, now)
        values = self.tasks.get((rank, task))
        if values is None:
            return [task, *who, state, *["-"] * 8]
        earlier: dict[str, float] = {}
        since = float(str(about.get("started", self.times[rank])))
        if before is not None and rank in before.times:
            earlier, since = before.tasks.get((rank, task), {}), before.times[rank]
        seconds = max(self.times[rank] - since, 1e-9)

        def change(name: str) -> float:
            return values.get(name, 0.0) - earlier.get(name, 0.0)

        stale = change("staleness") / change("changes") if change("changes") else None
        numbers = [
            f"{change('steps') / seconds:,.1f}",
            f"{change('in_bytes') / _MIB / seconds:,.1f}",
            f"{change('out_bytes') / _MIB / seconds:,.1f}",
            "-" if stale is None else f"{stale:.1f}",
            f"{values['queued']:.0f}" if "queued" in values else "-",
            f"{change('waited_s') / seconds:.0%}" if "waited_s" in values else "-",
            f"{change('data_waited_s') / seconds:.0%}" if "data_waited_s" in values else "-",
            f"{change('busy_s') / seconds:.0%}" if "busy_s" in values else "-",
        ]
        return [task, *who, state, *numbers]

    def _name(self, rank: int) -> str:
        about = self.ranks[rank]
        return f"{about['job']} {about['task']}" if about.get("job") else "-"

    def _state(self, rank: int, now: float) -> str:
        if rank in self.failures:
            return "failed"
        if rank in self.ends:
            return "ended" if self.ends[rank].get("exit_code") == 0 else "failed"
        if self.over:
            return "ended"
        if self._is_gone(rank):
            return "gone"
        silent_s = now - self.times.get(rank, now)
        return "running" if silent_s < _SILENT_S else f"silent {silent_s:.0f} s"


def _check(record: Mapping[str, Any]) -> None:
    """Raise something if a record of a rank has not the shape that it should have."""
    float(record.get("started", 0.0))
    if record.get("job") and "task" not in record:
        raise KeyError("task")


def newest_folder() -> Path | None:
    """Local. That of the job which ``mpidist run`` has started last on this host, if it runs."""
    running = []
    for path in Path(tempfile.gettempdir()).glob("mpidist-run-*"):
        # A folder of somebody else's, or one that goes this moment, is none.
        with contextlib.suppress(OSError, ValueError):
            snapshot = Snapshot.of(path)
            if snapshot.ranks and not (snapshot.is_over() or snapshot.is_abandoned()):
                running.append((path.stat().st_mtime, path))
    return max(running, default=(0.0, None))[1]


def _run(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> int:
    if not 0 < namespace.interval <= _LONGEST_S:
        limits = f"positive, and at most {_LONGEST_S:g}"
        parser.error(f"--interval {namespace.interval:g} must be {limits}")
    folder = newest_folder() if namespace.folder is None else Path(namespace.folder)
    if folder is None:
        parser.error("no job of mpidist run is running on this host; name its --run-dir")
    try:
        snapshot = Snapshot.of(folder)
    except (OSError, ValueError) as error:
        parser.error(f"{folder} is not the folder of a job: {error}")
    if not snapshot.ranks:
        parser.error(f"{folder} is not the folder of a job: no rank has started in it")
    if namespace.once:
        _console().print(_table(snapshot, None))
        return 0
    try:
        _watch(folder, snapshot, namespace.interval)
    except (OSError, ValueError) as error:
        parser.error(f"{folder}: {error}")
    return 0


def _watch(folder: Path, snapshot: Snapshot, interval_s: float) -> None:
    from rich.live import Live

    base, abandoned = Snapshot({}, {}, {}), 0  # at first, the start
    console = _console()
    with Live(_table(snapshot, None), console=console, auto_refresh=False) as live:
        while not snapshot.is_over() and abandoned < 2:
            time.sleep(interval_s)
            try:
                following = Snapshot.of(folder)
            except FileNotFoundError:  # the folder of a job goes with it
                break
            base = following.base_of_rates(snapshot, base)
            live.update(_table(following, base), refresh=True)
            snapshot = following
            abandoned = abandoned + 1 if snapshot.is_abandoned() else 0
    if not console.is_terminal:
        console.print()


def _table(snapshot: Snapshot, before: Snapshot | None) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for row in snapshot.rows(before, time.time()):
        table.add_row(*map(Text, row))  # a name may have brackets
    for number, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if number > 4 else "left"
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)
