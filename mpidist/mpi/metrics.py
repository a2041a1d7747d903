"""Metrics of the tasks of this process, and a timeline of their work.

Once a second a rank writes the metrics of its tasks into the run folder, where ``mpidist top``
reads them. If ``MPIDIST_TIMELINE`` names a folder, the rank draws a timeline there: events of
Chrome's Trace Event Format, as an array without an end, which Perfetto opens.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import defaultdict
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
    if name not in _tasks:
        _tasks[name] = TaskMetrics(name)
        _name_timeline()
    return _tasks[name]


def snapshot() -> dict[str, dict[str, float]]:
    """Return the metrics of all tasks of this process, by job and index."""
    return {name: dict(task.values) for name, task in list(_tasks.items())}


class Timeline:
    """The timeline of this process.

    Args:
        folder: Folder of the file. It is made if it does not exist.
        rank: Rank of this process, or its process id if no launcher started it.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._path = os.path.join(folder, f"timeline-{rank}.json")
        self._rank = rank
        self._failed = False
        os.makedirs(folder, exist_ok=True)
        # Each event is one write, so threads do not mix lines, and a killed rank loses none.
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        os.write(self._file, b"[\n")

    def add(self, event: dict[str, Any]) -> None:
        """Append an event. Process and thread are filled in."""
        line = json.dumps({"pid": self._rank, "tid": threading.get_native_id(), **event}) + ",\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            if not self._failed:
                logger.warning("the timeline has gaps: cannot write %s: %s", self._path, error)
            self._failed = True


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
    _name_timeline()


def _name_timeline() -> None:
    """Name the timeline after the tasks of this process."""
    if _timeline is not None and _tasks:
        args = {"name": ", ".join(_tasks)}
        _timeline.add({"name": "process_name", "ph": "M", "args": args})
