"""``mpidist top``: show the activity of the tasks of a job, from the records in its run folder."""

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

from mpidist.launcher.report import is_over, read_records

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MIB = 1 << 20
_SILENT_S = 5.0  # ranks write their state once a second
_LONGEST_S = 86400.0
_COLUMNS = (
    "task", "rank", "host", "pid", "state",
    "steps/s", "in MiB/s", "out MiB/s", "staleness", "queue", "waiting", "data wait", "busy",
)  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "top",
        help="show the activity of the tasks of a running job",
        description="Show the activity of the tasks of a running job, until they have ended.",
        epilog="Steps of a ps are pushes. Staleness: the mean number of changes by other tasks "
        "that a change had not seen. Steps of a data task are elements. Waiting (of a data task: "
        "for readers), data wait (for elements of a data service) and busy: parts of the time.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        help="the job's --run-dir; by default the newest job's on this host",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table, of the means since the start, and end"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds; 1")
    parser.set_defaults(run=lambda namespace: _run(parser, namespace))


@dataclass(frozen=True)
class Snapshot:
    """The records in a run folder at one moment.

    Attributes:
        ranks: Records of the ranks, by rank.
        exits: Records of the ranks that have ended.
        failures: Records of the ranks that have recorded a failure.
        over: Whether ``mpidist run`` has recorded the end of the job.
        times: Times at which ranks wrote their state, in seconds since the epoch.
        tasks: Metrics by name, by rank and task.
    """

    ranks: dict[int, dict[str, object]]
    exits: dict[int, dict[str, object]]
    failures: dict[int, dict[str, object]]
    over: bool = False
    times: dict[int, float] = field(default_factory=dict)
    tasks: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Snapshot:
        """Read a run folder.

        Raises:
            OSError: The folder does not exist, or cannot be read.
            ValueError: A file was not written by a rank.
        """
        kind = ""
        folder.stat()  # read_records() finds nothing in a folder that does not exist
        try:
            ranks, exits, failures = (read_records(folder, k) for k in ("rank", "exit", "failure"))
            snapshot = cls(ranks, exits, failures, is_over(folder))
            for record in (*ranks.values(), *exits.values(), *failures.values()):
                _check(record)
            kind = "state"
            for rank, record in read_records(folder, kind).items():
                snapshot.times[rank] = float(record["time"])
                for task, values in record["tasks"].items():
                    snapshot.tasks[rank, task] = {name: float(n) for name, n in values.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            file = f"a file {kind}-<rank>.json" if kind else "a file"
            raise ValueError(f"{file} was not written by a rank ({error!r})") from None
        return snapshot

    def is_over(self) -> bool:
        """Return whether all known ranks have ended."""
        ended = self.exits.keys() | self.failures.keys()
        return self.over or (bool(self.ranks) and self.ranks.keys() <= ended)

    def is_abandoned(self) -> bool:
        """Return whether all ranks were on this host and are gone without a record.

        The end of a rank is recorded a moment later, so only a second look is certain.
        """
        ended = self.exits.keys() | self.failures.keys()
        return all(rank in ended or self._is_gone(rank) for rank in self.ranks)

    def _is_gone(self, rank: int) -> bool:
        """Return whether the process of a rank was on this host and does not exist any more."""
        record = self.ranks.get(rank, {})
        here = record.get("host") == socket.gethostname()
        return here and not Path(f"/proc/{record.get('pid')}").exists()

    def base_of_rates(self, last: Snapshot, base: Snapshot) -> Snapshot:
        """Return the earlier metrics to which those of this snapshot are compared.

        Args:
            last: The snapshot before this one.
            base: The base of that one. It stays the base of a rank that has not written since.
        """
        following = Snapshot(self.ranks, self.exits, self.failures, self.over)
        for rank, now in self.times.items():
            source = base if last.times.get(rank, now) == now else last
            if rank in source.times:
                following.times[rank] = source.times[rank]
                own = {key: values for key, values in source.tasks.items() if key[0] == rank}
                following.tasks.update(own)
        return following

    def rows(self, before: Snapshot | None, now: float) -> list[list[str]]:
        """Return a row of texts for each task.

        Args:
            before: The base of the rates; None for the start of the ranks.
            now: Seconds since the epoch.
        """
        tasks: list[tuple[int, str]] = sorted(self.tasks, key=lambda key: (key[1], key[0]))
        without = sorted(self.ranks.keys() - {rank for rank, _ in tasks})
        rows = [self._row(rank, task, before, now) for rank, task in tasks]
        return rows + [self._row(rank, self._name(rank), before, now) for rank in without]

    def _row(self, rank: int, task: str, before: Snapshot | None, now: float) -> list[str]:
        record = self.ranks.get(rank, {})
        place = [str(rank), str(record.get("host", "?")), str(record.get("pid", "?"))]
        state = self._state(rank, now)
        values = self.tasks.get((rank, task))
        if values is None:
            return [task, *place, state, *["-"] * 8]
        earlier: dict[str, float] = {}
        since = float(str(record.get("started", self.times[rank])))
        if before is not None and rank in before.times:
            earlier, since = before.tasks.get((rank, task), {}), before.times[rank]
        seconds = max(self.times[rank] - since, 1e-9)

        def change(name: str) -> float:
            return values.get(name, 0.0) - earlier.get(name, 0.0)

        def part(name: str) -> str:
            return f"{change(name) / seconds:.0%}" if name in values else "-"

        stale = change("staleness") / change("changes") if change("changes") else None
        numbers = [
            f"{change('steps') / seconds:,.1f}",
            f"{change('in_bytes') / _MIB / seconds:,.1f}",
            f"{change('out_bytes') / _MIB / seconds:,.1f}",
            "-" if stale is None else f"{stale:.1f}",
            f"{values['queued']:.0f}" if "queued" in values else "-",
            *(part(name) for name in ("waited_s", "data_waited_s", "busy_s")),
        ]
        return [task, *place, state, *numbers]

    def _name(self, rank: int) -> str:
        record = self.ranks[rank]
        return f"{record['job']} {record['task']}" if record.get("job") else "-"

    def _state(self, rank: int, now: float) -> str:
        if rank in self.failures:
            return "failed"
        if rank in self.exits:
            return "ended" if self.exits[rank].get("exit_code") == 0 else "failed"
        if self.over:
            return "ended"
        if self._is_gone(rank):
            return "gone"
        silent_s = now - self.times.get(rank, now)
        return "running" if silent_s < _SILENT_S else f"silent {silent_s:.0f} s"


def _check(record: Mapping[str, Any]) -> None:
    """Raise an error if the record of a rank does not have its shape."""
    float(record.get("started", 0.0))
    if record.get("job") and "task" not in record:
        raise KeyError("task")


def newest_folder() -> Path | None:
    """Return the folder of the newest running job of ``mpidist run`` on this host."""
    running = []
    for path in Path(tempfile.gettempdir()).glob("mpidist-run-*"):
        # Skipped: folders of other users, and folders that are being removed.
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
    """Print tables until the job is over."""
    from rich.live import Live

    base, abandoned = Snapshot({}, {}, {}), 0  # the first rates are those since the start
    console = _console()
    with Live(_table(snapshot, None), console=console, auto_refresh=False) as live:
        while not snapshot.is_over() and abandoned < 2:
            time.sleep(interval_s)
            try:
                following = Snapshot.of(folder)
            except FileNotFoundError:  # a temporary folder is removed at the end of the job
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
        table.add_row(*map(Text, row))  # a plain str could have rich's markup, in brackets
    for number, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if number > 4 else "left"
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)
