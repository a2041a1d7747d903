"""The reports that ``mpidist run`` prints by itself."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpidist.launcher.hang.report import Report


class Reporter:
    """Reports on a job in a thread, so that the job can be ended meanwhile.

    Args:
        folder: The run folder.
        find_lost: Returns the lost hosts. Arguments: the silent ranks, the ranks that answer, and a
            function that returns True to cancel the search.
    """

    def __init__(
        self,
        folder: Path,
        find_lost: Callable[[Sequence[int], Sequence[int], Callable[[], bool]], list[str]],
    ) -> None:
        self._folder = folder
        self._find_lost = find_lost
        self._stall = folder / "stall.json"
        self._seen = 0
        self._printed: set[str] = set()
        self._wanted: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._job_is_over = threading.Event()

    @property
    def is_running(self) -> bool:
        """True until a report that was started has been printed."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, why: str) -> None:
        """Start a report, after the one that is running.

        Args:
            why: First line of the report; "" for a report that is printed if the job is stuck.
        """
        self._wanted.append(why)
        if not self.is_running:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def note_end(self) -> None:
        """Note that the processes of the job are being ended."""
        self._job_is_over.set()

    def check_stall(self) -> None:
        """Start a report if a rank has reported a long wait."""
        try:
            changed = self._stall.stat().st_mtime_ns
        except OSError:  # no rank has
            return
        if changed != self._seen and not self.is_running:
            self._seen = changed
            self.start("")

    def _run(self) -> None:
        while self._wanted:
            self._report(self._wanted.popleft())

    def _report(self, why: str) -> None:
        from mpidist.launcher.hang.report import report_on  # few jobs need it

        try:
            report = report_on(self._folder)
            if not why and self._find_lost(report.silent, report.alive, self._is_search_cancelled):
                return  # run_job ends the attempt, whose reason names the hosts
            lines = [why, *report.lines()] if why else self._lines_of_stall(report)
        except FileNotFoundError:  # the job has ended, and its folder is being removed
            return
        except Exception as error:  # the job goes on without the report
            lines = [f"cannot report on the job: {error!r}"]
        if lines:
            sys.stderr.write(
                "".join(["\n", *(f"mpidist run: {line}".rstrip() + "\n" for line in lines)])
            )
            sys.stderr.flush()

    def _is_search_cancelled(self) -> bool:
        """Return whether the job is over, or another report is due."""
        return self._job_is_over.is_set() or bool(self._wanted)

    def _lines_of_stall(self, report: Report) -> list[str]:
        """Return the report on ranks that have waited for long; [] if nothing is stuck.

        Nothing is wrong if a rank is only slow, up to a limit.
        """
        stall = json.loads(self._stall.read_text(encoding="utf-8"))
        cause = report.cause
        if report.waited_s < stall["stall_s"]:  # the wait has ended meanwhile
            return []
        stuck = cause.verdict == "stuck" or (cause.verdict == "unknown" and bool(cause.waiting))
        if not stuck and not (cause.verdict == "slow" and stall["again"]):
            return []
        if report.text in self._printed:
            return []
        self._printed.add(report.text)
        return [
            f"a rank has waited for {report.waited_s:.0f} s (MPIDIST_STALL_S):",
            *report.lines(),
        ]
