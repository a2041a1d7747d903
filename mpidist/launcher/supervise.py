"""Runs one command with everything it starts, to the end: by itself, in time, or by force."""

from __future__ import annotations

import enum
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mpidist.launcher import processes
from mpidist.launcher.shared_files import SharedFiles
from mpidist.launcher.standard_input import StandardInput

_TICK_S = 0.1
_LEAVE_S = 1.0
_KILL_WAIT_S = 2.0
# Ranks may know what they mean. Launchers hand on what they can; the others would end by them.
_FOR_JOB = (signal.SIGUSR1, signal.SIGUSR2)


class Ending(enum.Enum):
    """Why a job ended."""

    ITSELF = "itself"
    SIGNAL = "signal"
    TIMEOUT = "timeout"
    STUCK = "stuck"


@dataclass(frozen=True)
class Result:
    """How a job ended.

    Attributes:
        ending: Why.
        status: The launcher's exit status as a shell shows it.
        signal: The signal that this command received, or 0.
        killed: How many processes had to be killed after the launcher had ended or been given up.
        alive: How many of those are still there.
    """

    ending: Ending
    status: int
    signal: int
    killed: int
    alive: int


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    Attributes:
        run_s: The job; None for no limit.
        failed_s: The launcher, to end the job after a rank has failed; and what ranks have left
            behind, after all have ended. A launcher may then still wait for who reads its output.
        polite_s: The launcher, to end after the signal that the user sent.
        term_s: The launcher, to end after SIGTERM.
    """

    run_s: float | None = None
    failed_s: float = 2.0
    polite_s: float = 1.5
    term_s: float = 1.5


@contextmanager
def asked_to_end() -> Iterator[tuple[int, list[int]]]:
    """Local. Collect the signals that ask to end, and those for the job to see.

    Gives a readable descriptor and the list. What this command was started to ignore, as nohup
    and a script's ``&`` have it, stays ignored. Entered before anything is made that must be
    removed.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_FOR_JOB)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    old = signal.set_wakeup_fd(writing)
    try:
        yield reading, received
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class _Job:
    """The launcher while it runs, and the steps that end it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # A session of its own keeps the terminal's Ctrl-C from the ranks: it comes to us alone.
        self._launcher = subprocess.Popen(
            command,
            env=dict(environment),
            # Launchers read all they can get, also input that belongs to a shell loop around us.
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
        self.handle = os.pidfd_open(self._launcher.pid)
        self._steps: list[tuple[float, int]] = []
        self._dropped: set[int] = set()

    def status(self) -> int | None:
        """Local. The exit status, if the launcher has ended."""
        code = self._launcher.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self, first: int, limits: Limits) -> None:
        """Local. Begin to end the job: the signal given, then SIGTERM, then SIGKILL to all."""
        now = time.monotonic()
        polite = limits.polite_s if first != signal.SIGTERM else 0.0
        self._steps = [(now, first)]
        if polite:
            self._steps.append((now + polite, signal.SIGTERM))
        self._steps.append((now + polite + limits.term_s, signal.SIGKILL))

    def tell(self, number: int) -> None:
        """Local. Hand a signal to the launcher, which goes on."""
        self._launcher.send_signal(number)

    def reap_orphans(self) -> None:
        """Local. Collect what has become ours and has ended, so that it does not stay till then."""
        processes.reap(but=self._launcher.pid)

    def hurry(self) -> None:
        """Local. Go to the last step now."""
        self._steps = [(time.monotonic(), signal.SIGKILL)]

    def step(self) -> bool:
        """Local. Take the steps that are due; tells whether the last was taken."""
        while self._steps and self._steps[0][0] <= time.monotonic():
            number = self._steps.pop(0)[1]
            if number == signal.SIGKILL:
                return True
            self._launcher.send_signal(number)
        return False

    def drop_orphans(self) -> None:
        """Local. Kill what no longer hangs on the launcher; it waits for those that hold pipes."""
        own = {process.pid for process in processes.descendants(self._launcher.pid)}
        for process in processes.descendants():
            if process.pid not in own and process.pid != self._launcher.pid:
                process.send(signal.SIGKILL)
                self._dropped.add(process.pid)

    def close(self) -> tuple[int, int]:
        """Local. Kill what is left, the launcher too; how many there were, and still are."""
        if self._launcher.poll() is not None:
            # A launcher may end before those it has just told to end.
            processes.wait_descendants(_LEAVE_S)
        killed, alive = processes.kill_descendants(_KILL_WAIT_S)
        os.close(self.handle)
        return len(self._dropped | killed), alive


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    limits: Limits,
    signals: tuple[int, list[int]],
    *,
    failed: Callable[[], bool],
    ended: Callable[[], bool],
    shared_files: SharedFiles,
    standard_input: StandardInput | None = None,
    passed_on: Sequence[int] = (),
) -> Result:
    """Run a launcher until the launcher, and everything it started, has ended.

    Args:
        command: The launcher's command line.
        environment: Its environment.
        limits: How long things may take.
        signals: What :func:`asked_to_end` gives.
        failed: Tells whether a rank has failed; then the launcher must end soon.
        ended: Tells whether all ranks have ended; what they leave behind must not keep the
            launcher waiting.
        shared_files: Looks at the files that the job makes.
        standard_input: Gives our standard input to rank 0; None to give it to no rank.
        passed_on: Signals that the launcher hands to its ranks.

    Returns:
        How it ended.
    """
    processes.adopt_orphans()
    ending, number, over_at = Ending.ITSELF, 0, 0.0
    started = time.monotonic()
    wakeup, received = signals
    job = _Job(command, environment)
    watched = [handle for handle in (shared_files.handle,) if handle is not None]
    asked = [standard_input.handle] if standard_input is not None else []
    try:
        while (status := job.status()) is None:
            readable, _, _ = select.select([job.handle, wakeup, *watched, *asked], [], [], _TICK_S)
            if wakeup in readable:
                os.read(wakeup, 64)
            if not watched or watched[0] in readable:
                shared_files.look()
            if standard_input is not None and standard_input.handle in readable:
                standard_input.hand_over()
            job.reap_orphans()
            now = time.monotonic()
            while received:
                if received[0] in _FOR_JOB:
                    told = received.pop(0)
                    if told in passed_on:
                        job.tell(told)
                    continue
                again, number = number, received.pop(0)
                job.hurry() if again else job.end(number, limits)
                ending = Ending.SIGNAL
            if ending is Ending.ITSELF:
                if limits.run_s is not None and now - started > limits.run_s:
                    ending = Ending.TIMEOUT
                    job.end(signal.SIGTERM, limits)
                elif not over_at:
                    over_at = now if failed() or ended() else 0.0
                elif now - over_at > limits.failed_s:
                    if failed():
                        ending = Ending.STUCK
                        job.end(signal.SIGTERM, limits)
                    else:
                        job.drop_orphans()
            if job.step():
                break
    finally:
        killed, alive = job.close()
    sys.stdout.flush()
    return Result(ending, 128 + signal.SIGKILL if status is None else status, number, killed, alive)
