"""The facts about the ranks of a job: records, flight recorders, waits, threads and stacks."""

from __future__ import annotations

import json
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mpidist.launcher.layout import Layout
from mpidist.launcher.report import first_failure
from mpidist.launcher.run_folder import is_over, read_record, read_records
from mpidist.recorder import Recording, read_recording
from mpidist.runner import RUNNER_FILE, STACKS_SIGNAL

_ANSWER_S = 8.0  # for the wrappers of the ranks to look
_STATE_S = 2.2  # for the watchdogs of the ranks to write the waits
_POLL_S = 0.05
_HIDDEN = (RUNNER_FILE, "<frozen runpy>", "<frozen importlib._bootstrap>")


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return the place. Files in the current folder are shown without it."""
        return f"{self.file.removeprefix(_current_folder())}:{self.line}"


@cache
def _current_folder() -> str:
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:  # it was removed
        return os.sep


Stack = tuple[Frame, ...]
"""The frames of a thread, innermost first."""


@dataclass(frozen=True)
class Thread:
    """A thread that is not the main one.

    Attributes:
        stack: Its stack.
        name: Its name; "" if it was not made by the module ``threading``.
        keeps_alive: Whether the process waits for it at its exit, as it is not a daemon.
    """

    stack: Stack
    name: str = ""
    keeps_alive: bool = False


@dataclass(frozen=True)
class Wait:
    """A wait from the state record of a rank; see :class:`mpidist.mpi.pending.Wait`.

    Attributes:
        what: The wait, in words.
        ranks: The ranks that can end it; () if they are not known.
        since: Its start, in seconds since the epoch.
        slot: Place of an operation in the flight recorder; 0 for other waits.
        is_call: Whether it is a call of a group.
    """

    what: str
    ranks: tuple[int, ...]
    since: float
    slot: int
    is_call: bool


@dataclass(frozen=True)
class Rank:
    """The facts about one rank.

    Attributes:
        rank: The rank.
        name: ``"rank 3 (worker 1)"``.
        has_started_mpi: Whether it has written its record.
        exit: Record of its end, or None.
        failure: Record of its failure, or None.
        look: The look of its wrapper, or None.
        recording: Its flight recorder, or None.
        has_moved: Whether it has begun or ended operations, or made steps, since the report began.
        counts: Number of the last collective that it has begun, by group.
        waits: Its waits of more than a second.
        stacks: The stacks of its main thread within a second; () if there are none.
        other_threads: Its other threads.
    """

    rank: int
    name: str
    has_started_mpi: bool = False
    exit: Mapping[str, Any] | None = None
    failure: Mapping[str, Any] | None = None
    look: Mapping[str, Any] | None = None
    recording: Recording | None = None
    has_moved: bool = False
    counts: Mapping[int, int] = field(default_factory=dict)
    waits: tuple[Wait, ...] = ()
    stacks: tuple[Stack, ...] = ()
    other_threads: tuple[Thread, ...] = ()

    @property
    def is_live(self) -> bool:
        """True if the rank has not ended."""
        return self.exit is None and self.failure is None


@dataclass(frozen=True)
class Facts:
    """The facts about a job at one moment.

    Attributes:
        folder: The run folder.
        ranks: The ranks, in order.
        is_over: Whether the job has ended.
        ended_meanwhile: Whether it has ended since the report began.
        status: The exit status of ``mpidist run``; None if it has not ended, or was killed.
        failed: The rank that failed first, and its reason; None if no rank has failed.
        time: The moment, in seconds since the epoch.
    """

    folder: Path
    ranks: tuple[Rank, ...]
    is_over: bool
    ended_meanwhile: bool
    status: int | None
    failed: tuple[int, str] | None
    time: float

    @property
    def is_ending(self) -> bool:
        """True if the job has ended, or its ranks are being ended."""
        terminated = (rank.exit is not None and rank.exit["terminated"] for rank in self.ranks)
        return self.is_over or self.failed is not None or any(terminated)


def write_job(folder: Path, layout: Layout, attempt: int) -> None:
    """Write ``job.json``: the ranks, the process of mpidist run, and the attempt.

    Args:
        folder: The run folder.
        layout: The ranks and their jobs.
        attempt: Number of earlier attempts of the job.
    """
    names = [layout.task(rank) for rank in range(layout.ranks)]
    job = {
        "ranks": layout.ranks, "names": names, "pid": os.getpid(), "host": socket.gethostname(),
        "attempt": attempt,
    }  # fmt: skip
    part = folder / "job.json.new"
    part.write_text(json.dumps(job), encoding="utf-8")
    part.replace(folder / "job.json")


def running_jobs() -> list[tuple[Path, str]]:
    """Return the jobs without a ``--run-dir`` that run on this host, newest first.

    Returns:
        For each job its folder, and its command line with the process.
    """
    running = []
    for path in Path(tempfile.gettempdir()).glob("mpidist-run-*"):
        # Skipped: folders of other users, and folders that are being removed.
        with suppress(OSError, ValueError, KeyError):
            start = path / "job.json"
            job = json.loads(start.read_text(encoding="utf-8"))
            if not _has_ended(path, job):
                running.append((start.stat().st_mtime, path, _command_of(job["pid"])))
    return [(path, command) for _, path, command in sorted(running, reverse=True)]


def _command_of(pid: int) -> str:
    """Return the command line of ``mpidist run``, and its process."""
    words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").rstrip("\0").split("\0")
    if "run" in words:
        words = ["mpidist", *words[words.index("run") :]]
    return f"{shlex.join(words)} (process {pid})"


def _has_ended(folder: Path, job: Mapping[str, Any]) -> bool:
    """Return whether a job has ended. ``mpidist run`` records no end if SIGKILL ends it."""
    is_here = job.get("host") == socket.gethostname()
    return is_over(folder) or (is_here and not Path(f"/proc/{job['pid']}").exists())


def _read_job(folder: Path) -> dict[str, Any]:
    try:
        text = (folder / "job.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        problem = "does not exist"
        if folder.is_dir():
            problem = "has no job.json, so it is not the folder of a job"
        raise FileNotFoundError(f"{folder} {problem}; name the --run-dir of the job") from None
    job: dict[str, Any] = json.loads(text)
    return job


def gather(folder: Path) -> Facts:
    """Ask the ranks of a job, and return the facts. This takes one to eight seconds.

    Raises:
        FileNotFoundError: There is no job in the folder, or the folder has been removed meanwhile.
        OSError: The folder cannot be read or written.
        ValueError: A file is not JSON.
    """
    job = _read_job(folder)
    names = [tuple(task) if task is not None else None for task in job["names"]]
    before = {rank: read_recording(folder, rank) for rank in range(job["ranks"])}
    metrics = {rank: state.get("tasks") for rank, state in read_records(folder, "state").items()}
    was_over = _has_ended(folder, job)
    looks = {} if was_over else _look(folder, job)
    if not folder.is_dir():
        raise FileNotFoundError(
            "the job ended while it was asked, and its folder has been removed; mpidist run "
            "--run-dir DIR keeps the records of a job"
        )
    over = _has_ended(folder, job)
    if over:  # the looks may be of ranks that were about to end
        looks = {}
    records, states, exits, failures = (
        read_records(folder, kind) for kind in ("rank", "state", "exit", "failure")
    )
    for rank, record in records.items():
        if record.get("job") is not None:
            names[rank] = record["job"], record["task"]
    numbers = {f"{name[0]} {name[1]}": rank for rank, name in enumerate(names) if name is not None}
    numbers |= {f"rank {rank}": rank for rank in range(job["ranks"])}
    ranks = []
    for rank, name in enumerate(names):
        recording = read_recording(folder, rank)
        samples = looks.get(rank, {}).get("stacks", [])
        mains = tuple(_stack(threads[-1]) for threads in samples)
        others = samples[-1][:-1] if samples else ()
        kinds = looks.get(rank, {}).get("threads_of_python") or [("", False)] * len(others)
        ranks.append(
            Rank(
                rank,
                f"rank {rank}" if name is None else f"rank {rank} ({name[0]} {name[1]})",
                has_started_mpi=rank in records,
                # Ranks that the launcher ends may leave no record.
                exit=exits.get(rank, {"terminated": True} if over else None),
                failure=failures.get(rank),
                look=looks.get(rank),
                recording=recording,
                has_moved=_has_moved(before[rank], recording)
                or _steps(metrics.get(rank)) != _steps(states.get(rank, {}).get("tasks")),
                counts={int(k): v for k, v in states.get(rank, {}).get("counts", {}).items()},
                waits=() if over else _waits(states.get(rank, {}), numbers),
                stacks=mains,
                other_threads=tuple(
                    Thread(_stack(frames), *kind)
                    for frames, kind in zip(others, kinds, strict=True)
                ),
            )
        )
    failure = first_failure(folder)
    failed = None if failure is None else (failure["rank"], failure["reason"])
    status = read_record(folder, "end").get("status")
    return Facts(folder, tuple(ranks), over, over and not was_over, status, failed, time.time())


def _look(folder: Path, job: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Have the wrappers look at their ranks. Return their looks, by rank.

    If the job is about to end, wait for its end.
    """
    number, began, started = time.time_ns(), time.time(), time.monotonic()
    part = folder / f"look.json.{os.getpid()}"
    part.write_text(json.dumps({"number": number, "stacks_signal": STACKS_SIGNAL}))
    part.replace(folder / "look.json")
    found: dict[int, dict[str, Any]] = {}
    while True:
        records = read_records(folder, "look")
        # Numbers grow, so a later request, of another report, gives later looks.
        found = {rank: look for rank, look in records.items() if look["number"] >= number}
        if _has_ended(folder, job) or not folder.is_dir():
            break
        gone = read_records(folder, "exit")
        is_ending = (
            len(gone) == job["ranks"]
            or any(record["terminated"] for record in gone.values())
            or first_failure(folder) is not None
        )
        fresh = [
            rank
            for rank, state in read_records(folder, "state").items()
            if state["time"] > began + 1.0
        ]
        waited_s = time.monotonic() - started
        missing = set(range(job["ranks"])) - found.keys() - gone.keys()
        late = found.keys() & read_records(folder, "rank").keys() - set(fresh)
        is_complete = not missing and not is_ending
        if (is_complete or waited_s > _ANSWER_S) and (not late or waited_s > _STATE_S):
            break
        time.sleep(_POLL_S)
    return found


def _waits(state: Mapping[str, Any], numbers: Mapping[str, int]) -> tuple[Wait, ...]:
    return tuple(
        Wait(
            wait["what"],
            tuple(sorted(numbers[task] for task in wait["tasks"] if task in numbers)),
            wait["since"],
            wait["slot"],
            wait["is_call"],
        )
        for wait in state.get("waits", [])
    )


def _has_moved(before: Recording | None, after: Recording | None) -> bool:
    if before is None or after is None:
        return before is not after
    return before.entries[-1:] != after.entries[-1:] or _ended(before) != _ended(after)


def _steps(tasks: Mapping[str, Mapping[str, float]] | None) -> dict[str, float]:
    """Return the steps of the tasks of a rank, from its metrics."""
    return {name: values.get("steps", 0.0) for name, values in (tasks or {}).items()}


def _ended(recording: Recording) -> int:
    return sum(entry.end is not None for entry in recording.entries)


def _stack(frames: list[tuple[str, int, str]]) -> Stack:
    return tuple(Frame(*frame) for frame in frames if frame[0] not in _HIDDEN)
