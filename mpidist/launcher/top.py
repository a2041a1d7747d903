"""``mpidist top``: show the activity of the tasks of a job, from the records in its run folder."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mpidist.launcher.run_folder import Records, is_over, read_records
from mpidist.recorder import read_recording

if TYPE_CHECKING:
    from rich.console import Console, Group, JustifyMethod

_MIB = 1 << 20
_SILENT_S = 5.0  # ranks write their state once a second
_LONGEST_S = 86400.0
_COLUMNS = (
    "task", "rank", "host", "pid", "state", "operation",
    "steps\n/s", "in\nMiB/s", "out\nMiB/s", "stale-\nness", "queue", "wait-\ning", "data\nwait",
    "busy",
)  # fmt: skip
_HOST, _OPERATION, _FIRST_NUMBER = 2, 5, 6  # positions of columns
_NOTHING = {"-", "0", "0.0", "0%"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "top",
        help="show the activity of the tasks of a running job",
        description="Show the activity of the tasks of a running job, until they have ended, or "
        "until you press q. Columns without numbers are left out.",
        epilog="Operation: the call of a group in which the rank is, and its age. "
        "Steps of a ps are pushes. Staleness: the mean number of changes by other tasks "
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
    """The records in a run folder at one moment, by rank.

    Attributes:
        ranks: Records of the ranks that have started.
        exits: Records of the ranks that have ended.
        failures: Records of the ranks that have recorded a failure.
        metrics: State records of the ranks, with the metrics of their tasks.
        operations: The operation that each rank runs, with its age.
        over: Whether ``mpidist run`` has recorded the end of the job.
    """

    ranks: Records
    exits: Records
    failures: Records
    metrics: Records
    operations: dict[int, str]
    over: bool

    @classmethod
    def of(cls, folder: Path) -> Snapshot:
        """Read a run folder.

        Raises:
            OSError: The folder does not exist, or cannot be read.
            ValueError: A file is not JSON.
        """
        folder.stat()  # read_records() finds nothing in a folder that does not exist
        kinds = ("rank", "exit", "failure", "state")
        ranks, exits, failures, metrics = (
            read_records(folder, kind, strict=True) for kind in kinds
        )
        operations = {rank: _operation(folder, rank, time.time()) for rank in ranks}
        return cls(ranks, exits, failures, metrics, operations, is_over(folder))

    def states(self) -> set[str]:
        """Return the states of the ranks."""
        return {self._state(rank) for rank in self.ranks}

    def _state(self, rank: int) -> str:
        if rank in self.failures:
            return "failed"
        if rank in self.exits:
            return "ended" if self.exits[rank].get("exit_code") == 0 else "failed"
        if self.over:
            return "ended"
        record = self.ranks.get(rank, {})
        here = record.get("host") == socket.gethostname()
        return "gone" if here and not Path(f"/proc/{record.get('pid')}").exists() else "running"

    def rows(self, bases: Records, now: float) -> list[list[str]]:
        """Return a row of texts for each task.

        Args:
            bases: The earlier metrics from which the rates are computed. A rank without any has
                the rates since its start.
            now: Seconds since the epoch.

        Raises:
            ValueError: A file was not written by a rank.
        """
        try:
            tasks = [
                (rank, task) for rank, record in self.metrics.items() for task in record["tasks"]
            ]
            tasks.sort(key=lambda key: (key[1], key[0]))
            without = sorted(self.ranks.keys() - {rank for rank, _ in tasks})
            tasks += [(rank, self._name(rank)) for rank in without]
            return [self._row(rank, task, bases, now) for rank, task in tasks]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a file was not written by a rank ({error!r})") from None

    def _row(self, rank: int, task: str, bases: Records, now: float) -> list[str]:
        record, state = self.ranks.get(rank, {}), self._state(rank)
        place = [task, str(rank), str(record.get("host", "?")), str(record.get("pid", "?"))]
        operation = self.operations.get(rank, "-") if state == "running" else "-"
        if rank not in self.metrics:
            return [*place, state, operation, *["-"] * 8]
        written = self.metrics[rank]["time"]
        if state == "running" and now - written >= _SILENT_S:
            state = f"silent {now - written:.0f} s"
        if task not in self.metrics[rank]["tasks"]:
            return [*place, state, operation, *["-"] * 8]
        base = bases.get(rank, {"time": record.get("started", written), "tasks": {}})
        seconds = max(written - base["time"], 1e-9)
        values, earlier = self.metrics[rank]["tasks"][task], base["tasks"].get(task, {})

        def change(name: str) -> float:
            return float(values.get(name, 0.0) - earlier.get(name, 0.0))

        def part(name: str) -> str:
            return f"{change(name) / seconds:.0%}" if name in values else "-"

        numbers = [
            f"{change('steps') / seconds:,.1f}",
            f"{change('in_bytes') / _MIB / seconds:,.1f}",
            f"{change('out_bytes') / _MIB / seconds:,.1f}",
            f"{change('staleness') / change('changes'):.1f}" if change("changes") else "-",
            f"{values['queued']:.0f}" if "queued" in values else "-",
            *(part(name) for name in ("waited_s", "data_waited_s", "busy_s")),
        ]
        return [*place, state, operation, *numbers]

    def _name(self, rank: int) -> str:
        record = self.ranks[rank]
        return f"{record['job']} {record['task']}" if record.get("job") else "-"


def _operation(folder: Path, rank: int, now: float) -> str:
    """Return the operation of a group in which a rank is, with its age; "-" if there is none."""
    recording = read_recording(folder, rank)
    pending = [] if recording is None else [e for e in recording.entries if e.end is None]
    if not pending:
        return "-"
    entry = pending[-1]
    return f"{entry.name} {max(now - entry.start, 0.0):.0f} s"


def _has_keyboard() -> bool:
    """Return whether this process may read keys from a terminal.

    The system stops a background job that reads from its controlling terminal.
    """
    if not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # another terminal, which stops no job
        return True


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Deliver single keys from the terminal in the block, without the Enter key."""
    if not _has_keyboard():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin, termios.TCSADRAIN)  # keep the keys that were pressed before
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pause(seconds: float) -> bool:
    """Pause. Return True at once if the user presses q."""
    if not _has_keyboard():
        time.sleep(seconds)
        return False
    end = time.monotonic() + seconds
    while select.select([sys.stdin], [], [], max(end - time.monotonic(), 0.0))[0]:
        if os.read(sys.stdin.fileno(), 1) in (b"q", b""):
            return True
    return False


def newest_folder() -> Path | None:
    """Return the folder of the newest running job of ``mpidist run`` on this host."""
    running = []
    for path in Path(tempfile.gettempdir()).glob("mpidist-run-*"):
        # Skipped: folders of other users, and folders that are being removed.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if "running" in Snapshot.of(path).states():
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
        table = _table(snapshot, {}, folder)
    except (OSError, ValueError) as error:
        parser.error(f"{folder} is not the folder of a job: {error}")
    if not snapshot.ranks:
        parser.error(f"{folder} is not the folder of a job: no rank has started in it")
    if namespace.once:
        _console().print(table)
        return 0
    try:
        _watch(folder, snapshot, namespace.interval)
    except (OSError, ValueError) as error:
        parser.error(f"{folder}: {error}")
    return 0


def _watch(folder: Path, snapshot: Snapshot, interval_s: float) -> None:
    """Print tables until the job is over, or the user presses q."""
    from rich.live import Live

    bases: Records = {}
    before: set[str] = set()
    console = _console()
    first = _table(snapshot, bases, folder)
    with _keys(), Live(first, console=console, auto_refresh=False) as live:
        # The end of a rank is recorded a moment later, so a rank that is gone is looked at twice.
        while "running" in (states := snapshot.states()) or "gone" in states - before:
            before = states
            if _pause(interval_s):
                break
            try:
                following = Snapshot.of(folder)
            except FileNotFoundError:  # a temporary folder is removed at the end of the job
                live.console.print("the job has ended")
                break
            # A rank that has not written since keeps its base.
            for rank, record in following.metrics.items():
                last = snapshot.metrics.get(rank, record)
                if last != record:
                    bases[rank] = last
            live.update(_table(following, bases, folder), refresh=True)
            snapshot = following
    if not console.is_terminal:
        console.print()


def _table(snapshot: Snapshot, bases: Records, folder: Path) -> Group:
    """Return the table, without the columns that say nothing, so that it fits into 80 columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now = time.time()
    rows = snapshot.rows(bases, now)
    columns = list(zip(*rows, strict=True))
    shown = [
        number
        for number, values in enumerate(columns)
        if number < _OPERATION or not _NOTHING.issuperset(values)
    ]
    hosts = set(columns[_HOST]) if columns else set()
    if len(hosts) == 1:
        shown.remove(_HOST)
    title = str(folder)
    if len(hosts) == 1:
        title += f" on {hosts.pop()}"
    started = [record["started"] for record in snapshot.ranks.values() if "started" in record]
    if started:
        title += f", {timedelta(seconds=round(max(now - min(started), 0.0)))} since the start"
    title += time.strftime(" (%H:%M:%S)", time.localtime(now))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number in shown:
        justify: JustifyMethod = "right" if number >= _FIRST_NUMBER else "left"
        width = max(map(len, columns[number]))
        # Without a minimum, rich would cut names and pids on narrow terminals.
        fixed = width if number < _FIRST_NUMBER and number != _HOST else None
        table.add_column(_COLUMNS[number], justify=justify, no_wrap=True, min_width=fixed)
    for row in rows:
        # A plain str could have rich's markup, in brackets.
        table.add_row(*[Text(row[number]) for number in shown])
    return Group(Text(title), table)


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)
