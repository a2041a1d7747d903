"""Metrics of the tasks of this process, and a timeline of their work.

Once a second a rank writes the metrics of its tasks into the run folder, where ``mpidist top``
reads them. If ``MPIDIST_TIMELINE`` names a folder, the rank writes a timeline there: events of
Chrome's Trace Event Format, as an array without an end, which Perfetto opens.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpidist.config import config
from mpidist.mpi.launch_env import launcher_of

logger = logging.getLogger(__name__)

_tasks: dict[str, TaskMetrics] = {}


class TaskMetrics:
    """Metrics of one task of this process.

    Args:
        name: Job and index of the task.

    Attributes:
        name: Job and index of the task.
        values: Sums since the start, by name. The code of the task adds to them, and threads that
            add at the same moment may lose an addition. ``mpidist top`` shows ``steps``,
            ``in_bytes``, ``out_bytes``, ``changes`` and their ``staleness``, ``queued``,
            ``waited_s``, ``data_waited_s`` and ``busy_s``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, what: str, sum_name: str | None = None) -> Iterator[None]:
        """Add the time of the block to the timeline, and to a sum.

        Args:
            what: Name of the event in the timeline.
            sum_name: Name of the sum, if there is one.
        """
        begin = time.time()
        try:
            yield
        finally:
            self.note(what, begin, sum_name)

    def note(self, what: str, begin: float, sum_name: str | None = None) -> None:
        """Add an event that ends now to the timeline, and to a sum.

        Args:
            what: Name of the event in the timeline.
            begin: Begin of the event, in seconds since the epoch.
            sum_name: Name of the sum, if there is one.
        """
        seconds = time.time() - begin
        if sum_name is not None:
            self.values[sum_name] += seconds
        if _timeline is not None:
            _timeline.add(
                {"name": what, "cat": self.name, "ph": "X", "ts": 1e6 * begin, "dur": 1e6 * seconds}
            )


def task_metrics(job: str, index: int) -> TaskMetrics:
    """Return the metrics of a task of this process.

    Args:
        job: Job of the task.
        index: Index of the task.
    """
    name = f"{job} {index}"
    if launcher_of(os.environ) is None:  # no world begins a timeline
        start_timeline(os.getpid())
    return _tasks.setdefault(name, TaskMetrics(name))


def snapshot() -> dict[str, dict[str, float]]:
    """Return the metrics of all tasks of this process, as floats, by job and index."""
    now = {name: dict(task.values) for name, task in list(_tasks.items())}
    return {
        name: {str(what): float(value) for what, value in values.items()}
        for name, values in now.items()
    }


class Timeline:
    """The timeline of this process, and its file.

    Args:
        folder: Folder of the file. It is made if it does not exist.
        rank: Rank of this process, or its process id if no launcher started it.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._path = os.path.join(folder, f"timeline-{rank}.json")
        self._rank = rank
        self._events: deque[dict[str, Any]] = deque()  # threads add while another removes
        self._named: set[str] = set()
        self._before: dict[str, dict[str, float]] = {}
        self._writing = threading.Lock()
        self._failed = False
        os.makedirs(folder, exist_ok=True)
        with open(self._path, "w") as file:
            file.write("[\n")

    def add(self, event: dict[str, Any]) -> None:
        """Keep an event until the next write. Process and thread are filled in."""
        self._events.append({**event, "tid": threading.get_native_id()})

    def write(self) -> None:
        """Append the events since the last write, and the changes of the metrics.

        Staleness is the mean over the changes since the last write, as in ``mpidist top``.
        """
        with self._writing:
            events = [self._events.popleft() for _ in range(len(self._events))]
            events += self._counters()
            lines = [json.dumps({"pid": self._rank, **event}) + ",\n" for event in events]
            try:
                with open(self._path, "a") as file:
                    file.writelines(lines)
            except OSError as error:
                if not self._failed:
                    logger.warning("the timeline has gaps: cannot write %s: %s", self._path, error)
                self._failed = True

    def _counters(self) -> Iterator[dict[str, Any]]:
        now, before = snapshot(), self._before
        self._before = now
        name = ", ".join(now) or f"rank {self._rank}"
        if name not in self._named:
            self._named.add(name)
            yield {"name": "process_name", "ph": "M", "args": {"name": name}}
        for task, values in now.items():
            drawn = {
                what: value if what == "queued" else value - before.get(task, {}).get(what, 0.0)
                for what, value in values.items()
            }
            if "staleness" in drawn:  # without changes there is no mean
                total, count = drawn.pop("staleness"), drawn.get("changes")
                drawn |= {"staleness": total / count} if count else {}
            for what, value in drawn.items():
                args = {what: value}
                yield {"name": f"{task}: {what}", "ph": "C", "ts": 1e6 * time.time(), "args": args}


_timeline: Timeline | None = None


def start_timeline(rank: int) -> None:
    """Begin the timeline of this process, if ``MPIDIST_TIMELINE`` is set."""
    global _timeline
    if config.timeline is None or _timeline is not None:
        return
    try:
        _timeline = Timeline(config.timeline, rank)
    except OSError as error:
        logger.warning("no timeline is drawn: MPIDIST_TIMELINE=%s: %s", config.timeline, error)
    else:
        atexit.register(write_timeline)
        os.register_at_fork(after_in_child=_forget_timeline)


def _forget_timeline() -> None:
    global _timeline
    _timeline = None
    atexit.unregister(write_timeline)


def write_timeline() -> None:
    """Append the events since the last write, if there is a timeline."""
    if _timeline is not None:
        _timeline.write()
