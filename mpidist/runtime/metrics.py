"""What the tasks of this process have done so far, in numbers, and when they did it.

Once a second a rank writes the numbers of its tasks into the run folder, where ``mpidist top``
reads them, and what took its time into the folder ``MPIDIST_TIMELINE``, if that is set: events of
Chrome's Trace Event Format, in its form of an array that needs no end, which Perfetto opens.
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
from mpidist.runtime.launch import launcher_of

logger = logging.getLogger(__name__)

_tasks: dict[str, TaskMetrics] = {}


class TaskMetrics:
    """What a task of this process has done so far.

    Args:
        name: Job and index of the task.

    Attributes:
        name: Job and index of the task.
        values: Sums since the start, by name; whoever counts adds to them. Threads that add at the
            same moment may lose one. ``mpidist top`` knows: ``steps``, ``in_bytes``, ``out_bytes``,
            ``changes`` and their ``staleness``, ``queued``, ``waited_s``, ``data_waited_s``,
            ``busy_s``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, what: str, sum_name: str | None = None) -> Iterator[None]:
        """Local. Draw what happens in the block, and add its seconds to a sum.

        Args:
            what: For the timeline.
            sum_name: Of the sum, if there is one.
        """
        begin = time.time()
        try:
            yield
        finally:
            self.note(what, begin, sum_name)

    def note(self, what: str, begin: float, sum_name: str | None = None) -> None:
        """Local. Draw what has lasted until now; see :meth:`timed`.

        Args:
            what: For the timeline.
            begin: When it began, in seconds since the epoch.
            sum_name: Of the sum, if there is one.
        """
        seconds = time.time() - begin
        if sum_name is not None:
            self.values[sum_name] += seconds
        if _timeline is not None:
            _timeline.add(
                {"name": what, "cat": self.name, "ph": "X", "ts": 1e6 * begin, "dur": 1e6 * seconds}
            )


def task_metrics(job: str, index: int) -> TaskMetrics:
    """Local. The numbers of a task that lives in this process.

    Args:
        job: Of the task.
        index: Of the task.
    """
    name = f"{job} {index}"
    if launcher_of(os.environ) is None:  # nobody else begins, and ends, a timeline
        start_timeline(os.getpid())
    return _tasks.setdefault(name, TaskMetrics(name))


def snapshot() -> dict[str, dict[str, float]]:
    """Local. The numbers of all tasks of this process, by job and index; NumPy's become floats."""
    now = {name: dict(task.values) for name, task in list(_tasks.items())}
    return {
        name: {str(what): float(value) for what, value in values.items()}
        for name, values in now.items()
    }


class Timeline:
    """Events of this process, and the file that they go to.

    Args:
        folder: Of the file; made if it is not there.
        rank: Of this process; its process id if it was not launched.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._path = os.path.join(folder, f"timeline-{rank}.json")
        self._rank = rank
        self._events: deque[dict[str, Any]] = deque()  # other threads add while one takes
        self._named: set[str] = set()
        self._before: dict[str, dict[str, float]] = {}
        self._writing = threading.Lock()
        self._failed = False
        os.makedirs(folder, exist_ok=True)
        with open(self._path, "w") as file:
            file.write("[\n")

    def add(self, event: dict[str, Any]) -> None:
        """Local. Keep an event until the next write; process and thread are filled in."""
        self._events.append({**event, "tid": threading.get_native_id()})

    def write(self) -> None:
        """Local. Append what has come since the last time, and how the numbers have changed.

        Of staleness that is the mean of the changes since then, as in ``mpidist top``.
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
            if "staleness" in drawn:  # the mean, of which there is none without changes
                total, count = drawn.pop("staleness"), drawn.get("changes")
                drawn |= {"staleness": total / count} if count else {}
            for what, value in drawn.items():
                args = {what: value}
                yield {"name": f"{task}: {what}", "ph": "C", "ts": 1e6 * time.time(), "args": args}


_timeline: Timeline | None = None


def start_timeline(rank: int) -> None:
    """Local. Begin the timeline of this process, if ``MPIDIST_TIMELINE`` asks for one."""
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
    """Local. Write what has come since the last time, if there is a timeline."""
    if _timeline is not None:
        _timeline.write()
