"""The attempts of a job, and the decision to start it again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mpidist.launcher.job import Result
from mpidist.launcher.report import describe_signal, stopped_by
from mpidist.launcher.run_folder import read_record
from mpidist.runner import STOP_STATUS

# Signals after which the job can go on later, from its last checkpoint.
_STOPPING = (signal.SIGUSR1, signal.SIGTERM)


@dataclass(frozen=True)
class Attempt:
    """An attempt that has ended.

    Attributes:
        status: Its exit status.
        reason: Why it failed; "" if it did not.
        step: Step of its last checkpoint; None if it has completed none.
        lost: The hosts that were lost before it began.
    """

    status: int
    reason: str
    step: int | None
    lost: tuple[str, ...]


class Restarts:
    """Decides whether a job that has failed starts again.

    A checkpoint of a later step than all before it is progress. Only restarts after an attempt
    without progress are counted.

    Args:
        most: Number of restarts without progress; 0 for no restart at all.
        delay_s: Time before a restart, in seconds.
    """

    def __init__(self, most: int, delay_s: float) -> None:
        self._most = most
        self._delay_s = delay_s
        self._used = 0
        self._best = -1
        self._progress = False  # of the last attempt
        self._is_exhausted = False
        self.attempts: list[Attempt] = []

    def add(self, folder: Path, status: int, reason: str, lost: Iterable[str]) -> None:
        """Add an attempt that has ended.

        Args:
            folder: The run folder.
            status: Its exit status.
            reason: Why it failed.
            lost: The hosts that were lost before it began.
        """
        step = read_record(folder, "checkpoint").get("step")
        self.attempts.append(Attempt(status, reason, step, tuple(lost)))
        self._progress = step is not None and step > self._best
        if step is not None and self._progress:
            self._best, self._used = step, 0

    def may_go_on(self, folder: Path, result: Result) -> bool:
        """Return whether the job starts again after its last attempt. Count the restart.

        Args:
            folder: The run folder.
            result: The end of the attempt.
        """
        last = self.attempts[-1]
        timed_out = result.timed_out and not result.had_failed
        told = result.signal or timed_out or result.told_to_save or stopped_by(folder)
        # Only a closed pipe, as of `| head`, is a failure without a reason.
        if not last.status or not last.reason or told:
            return False
        if self._used >= self._most:
            self._is_exhausted = self._most > 0
            return False
        self._used += not self._progress
        return True

    def explain(self, reason: str) -> None:
        """Replace the reason of the last attempt."""
        self.attempts[-1] = replace(self.attempts[-1], reason=reason)

    def announcement(self, lost: Iterable[str]) -> str:
        """Return the line that begins the next attempt.

        Args:
            lost: The hosts that were lost.
        """
        last = "no new checkpoint yet" if self._best < 0 else f"last checkpoint: step {self._best}"
        delay = f" in {self._delay_s:g} s" if self._delay_s else ""
        without = f" without {', '.join(lost)}" if lost else ""
        return (
            f"attempt {len(self.attempts) + 1} begins{delay}{without} ({last}; "
            f"{self._used} of {self._most} restarts without progress)"
        )

    def wait(self, signals: set[int], deadline: float) -> int:
        """Wait before a restart. Return the signal that ended the wait, or 0.

        Args:
            signals: The signals that this command handles.
            deadline: Time limit of the job, as of ``time.monotonic()``.
        """
        left_s = max(deadline - time.monotonic(), 0.0)
        info = signal.sigtimedwait(ending_signals(signals), min(self._delay_s, left_s))
        return 0 if info is None else info.si_signo

    def summary(self) -> list[str]:
        """Return the reason of the only attempt, or a line for each of several."""
        if len(self.attempts) < 2:
            return [attempt.reason for attempt in self.attempts if attempt.reason]
        lines = []
        for number, attempt in enumerate(self.attempts, 1):
            saved = "no new checkpoint" if attempt.step is None else f"saved step {attempt.step}"
            without = f", without {', '.join(attempt.lost)}" if attempt.lost else ""
            lines.append(f"attempt {number}{without}: {attempt.reason or 'success'} ({saved})")
        if self._is_exhausted:
            lines.append(f"no further attempt after {self._used} restarts without progress")
        return lines


def ending_signals(signals: set[int]) -> set[int]:
    """Return the signals that end the job between two attempts.

    Args:
        signals: The signals that this command handles.
    """
    return signals & {signal.SIGINT, signal.SIGHUP, *_STOPPING}


def interrupted(number: int) -> tuple[int, str]:
    """Return the status and the reason of a job that a signal ended between two attempts."""
    name = "Ctrl-C" if number == signal.SIGINT else describe_signal(number)
    status = STOP_STATUS if number in _STOPPING else 128 + number
    return status, f"interrupted by {name} before the next attempt"
