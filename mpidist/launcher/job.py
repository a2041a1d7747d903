"""Run a job: the MPI launcher and every process below it, until all of them have ended."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from secrets import token_hex

from mpidist.launcher.hang.automatic import Reporter
from mpidist.launcher.leftovers import descendants, end_descendants, kill, reap

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user and group id
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Signals for the ranks, such as a batch system's warning before its time limit.
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
_ASK = signal.SIGQUIT  # from the keys Ctrl and backslash
_TICK_S = 0.1
# Time limit of the launcher after a rank has failed, and of processes that ranks leave behind after
# all ranks have ended. A launcher waits for each process that holds its pipes.
_OVER_S = 2.0
_REPORT_S = 15.0  # for the report at the time limit of the job
_STEP_S = 1.5  # time between the signals that end the launcher
_SAVE_S = 30.0  # for the checkpoint after SIGTERM; Slurm sends SIGKILL after as many seconds
_LEAVE_S = 1.0  # time for processes that the launcher has told to end before it ended itself


@dataclass(frozen=True)
class Result:
    """The end of a job.

    Attributes:
        status: Exit status of the launcher, as a shell shows it.
        signal: The signal that this command received to end the job, or 0.
        timed_out: Whether the job was ended at its time limit.
        had_failed: Whether a rank had failed before that signal, or before the time limit.
        killed: Number of processes that had to be killed because they outlived the launcher, or
            because the launcher did not end.
        alive: Number of processes that still exist.
        told_to_save: Whether SIGUSR1 has come, for ranks that save and then end the job.
    """

    status: int
    signal: int
    timed_out: bool
    had_failed: bool
    killed: int
    alive: int
    told_to_save: bool = False


@contextmanager
def blocked_signals() -> Iterator[set[int]]:
    """Block the signals that end the job, and those for the ranks, so that none is lost.

    Yields:
        The signals, for :func:`run_job`. Signals that this command was started to ignore, as by
        nohup, stay ignored.
    """
    caught = [n for n in (*_ENDING, *_FOR_RANKS, _ASK) if signal.getsignal(n) is not signal.SIG_IGN]
    numbers: set[int] = {signal.SIGCHLD, *caught}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield numbers
    finally:
        while signal.sigtimedwait(numbers, 0) is not None:
            pass  # the job has ended
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_job(
    command: Sequence[str],
    environment: Mapping[str, str],
    signals: set[int],
    *,
    failed: Callable[[], bool],
    ended: Callable[[], bool],
    saves: Callable[[], bool],
    awaits_manager: bool,
    reporter: Reporter,
    timeout_s: float | None,
    deadline: float,
    standard_input: socket.socket | None,
    passed_on: Sequence[int],
) -> Result:
    """Run a launcher until it and every process that it started have ended.

    Args:
        command: Command line of the launcher.
        environment: Environment of the launcher.
        signals: The value of :func:`blocked_signals`.
        failed: Returns whether a rank has failed. The launcher must then end soon.
        ended: Returns whether all ranks have ended. Processes that they left are then killed, so
            that the launcher does not wait for them.
        saves: Returns whether the job saves a checkpoint on SIGUSR1, and then ends. SIGTERM to this
            command then gives it time for that.
        awaits_manager: Whether SIGUSR1 waits until ``saves`` returns True. Before, it would kill a
            rank that has no handler yet.
        reporter: Reports why the job hangs: on SIGQUIT, at the time limit, and after a long wait.
        timeout_s: Limit of the whole job, also of its earlier attempts; None for no limit.
        deadline: Time of that limit, as of ``time.monotonic()``.
        standard_input: The value of :func:`listen_for_rank_0`; None if rank 0 gets an empty input.
        passed_on: Signals that the launcher sends on to its ranks. Others would end it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # descendants stay ours when their own parents end
    launcher = start_launcher(command, environment, signals)
    if standard_input is not None:
        threading.Thread(target=_hand_over, args=(standard_input,), daemon=True).start()
    received, timed_out, had_failed, over_at = 0, False, False, 0.0
    told_to_save = stops = False
    due: list[tuple[float, int]] = []  # signals for the launcher; SIGKILL is for every process
    dropped: set[int] = set()
    try:
        while launcher.poll() is None:
            info = signal.sigtimedwait(signals, _TICK_S)
            number = 0 if info is None else info.si_signo
            reap(but=launcher.pid)
            now = time.monotonic()
            reporter.check_stall()
            if stops and saves():
                stops = False
                launcher.send_signal(signal.SIGUSR1)
            if number == _ASK:
                reporter.start("what the ranks do:")
            elif number == signal.SIGUSR1 and awaits_manager:
                told_to_save = stops = True
            elif number in _FOR_RANKS:
                if number in passed_on:
                    launcher.send_signal(number)
            elif number in _ENDING:
                had_failed = had_failed or (not received and failed())
                if received:
                    due = [(now, signal.SIGKILL)]
                elif number == signal.SIGTERM and signal.SIGUSR1 in passed_on and saves():
                    launcher.send_signal(signal.SIGUSR1)
                    due = _steps(number, now + _SAVE_S)
                else:
                    due = _steps(number, now)
                received = number
            elif due:
                pass
            elif timed_out and timeout_s is not None:
                if not reporter.is_running or now > deadline + _REPORT_S:
                    due = _steps(signal.SIGTERM, now)
            elif timeout_s is not None and now > deadline:
                timed_out, had_failed = True, failed()
                reporter.start(f"the job has run for {timeout_s:g} s (--timeout):")
            elif not over_at:
                over_at = now if failed() or ended() else 0.0
            elif now - over_at > _OVER_S:
                if failed():
                    due = _steps(signal.SIGTERM, now)
                else:
                    own = {launcher.pid, *descendants(launcher.pid)}
                    left = set(descendants(os.getpid())) - own
                    kill(left)
                    dropped |= left
            if due and due[0][0] <= now:
                number = due.pop(0)[1]
                if number == signal.SIGKILL:
                    break
                launcher.send_signal(number)
    finally:
        reporter.note_end()
        status = launcher.poll()
        killed, alive = end_descendants(_LEAVE_S if status is not None else 0.0)
    if status is None:
        status = -signal.SIGKILL
    status = status if status >= 0 else 128 - status
    killed |= dropped
    return Result(status, received, timed_out, had_failed, len(killed), alive, told_to_save)


def start_launcher(
    command: Sequence[str],
    environment: Mapping[str, str],
    signals: set[int],
    *,
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start the MPI library's launcher.

    Args:
        command: Its command line.
        environment: Its environment.
        signals: The value of :func:`blocked_signals`. The launcher gets them unblocked.
        output: Its standard output and standard error; None for those of this process.
    """

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        die_with_parent()

    # In a session of its own, the launcher does not get Ctrl-C from the terminal: only this command
    # does. Launchers read all the input they can get, also that of a shell loop around us.
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=prepare,
    )


def _steps(first: int, now: float) -> list[tuple[float, int]]:
    """Return the signals that end the launcher, the last one SIGKILL, each with its time."""
    numbers = dict.fromkeys((first, signal.SIGTERM, signal.SIGKILL))
    return [(now + step * _STEP_S, number) for step, number in enumerate(numbers)]


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


# The standard input of rank 0. Its wrapper connects to a socket on this host and receives the
# descriptor (SCM_RIGHTS, unix(7)). Nothing is copied, so rank 0 reads at full speed, and bytes that
# rank 0 leaves unread stay in the file or pipe. Launchers copy standard input instead: MPICH's ends
# the job when 65,536 bytes stay unread, and reads a list that a shell loop needs.


def listen_for_rank_0() -> socket.socket:
    """Return a socket that gives the standard input of this process to rank 0."""
    listener = socket.socket(socket.AF_UNIX)
    # An abstract name leaves no file behind, and its length does not depend on TMPDIR: paths of
    # sockets end after 107 bytes.
    listener.bind(f"\0mpidist-{token_hex(16)}")
    listener.listen()
    return listener


def name_of(listener: socket.socket) -> str:
    """Return the name of the socket, for the wrapper."""
    return str(listener.getsockname()[1:], "ascii")


def _hand_over(listener: socket.socket) -> None:
    """Send the descriptor to the wrapper when it connects, and close it here."""
    while True:
        connection, _ = listener.accept()
        with connection, suppress(BrokenPipeError):  # the wrapper was killed
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            # Every user of the host sees abstract names.
            if _CREDENTIALS.unpack(peer)[1] == os.geteuid():
                socket.send_fds(connection, [b"0"], [0])
                break
    # The writer of a pipe must learn that rank 0 has ended, so only rank 0 may hold it.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


def input_is_elsewhere() -> bool:
    """Return whether standard input is a terminal that reads for another, foreground process."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not the terminal that controls this process
        return False
