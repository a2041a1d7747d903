"""Run a job: the MPI launcher and every process below it, until all of them have ended."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user and group id
# Signals for the ranks, such as a batch system's warning before its time limit.
_FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
_TICK_S = 0.1
_POLL_S = 0.01
# For the launcher, to end after a rank has failed, or for the processes that ranks have left, after
# all ranks have ended. A launcher waits for each process that holds its pipes.
_OVER_S = 2.0
_INTERRUPT_S = 1.5  # for the launcher, to end after the signal of the user
_TERMINATE_S = 1.5  # for the launcher, to end after SIGTERM
_LEAVE_S = 1.0  # for processes that the launcher has told to end before it ended itself
_KILL_S = 2.0  # for killed processes to disappear


class Ending(enum.Enum):
    """Reason for the end of a job."""

    ITSELF = "itself"
    SIGNAL = "signal"
    TIMEOUT = "timeout"
    STUCK = "stuck"


@dataclass(frozen=True)
class Result:
    """The end of a job.

    Attributes:
        ending: The reason.
        status: Exit status of the launcher, as a shell shows it.
        signal: The signal that this command received, or 0.
        killed: Number of processes that had to be killed because they outlived the launcher, or
            because the launcher did not end.
        alive: Number of processes that still exist.
    """

    ending: Ending
    status: int
    signal: int
    killed: int
    alive: int


class StandardInput:
    """Gives the standard input of this process to rank 0.

    The wrapper of rank 0 connects to a socket on this host and receives the descriptor
    (SCM_RIGHTS, unix(7)). Nothing is copied, so rank 0 reads at full speed, and bytes that rank 0
    leaves unread stay in the file or pipe. Launchers copy standard input instead: MPICH's ends the
    job when 65,536 bytes stay unread, and reads a list that a shell loop needs.

    Attributes:
        name: Name of the socket, for the wrapper.
        handle: A descriptor that is readable when the wrapper has connected; then call
            :meth:`hand_over`.
    """

    def __init__(self) -> None:
        # An abstract name leaves no file behind, and its length does not depend on TMPDIR: paths of
        # sockets end after 107 bytes.
        self.name = f"mpidist-{token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen()
        self.handle = self._socket.fileno()

    def hand_over(self) -> None:
        """Send the descriptor to the connected wrapper, and close it here."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the wrapper was killed
            connection, _ = self._socket.accept()
            with connection:
                peer = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
                )
                # Every user of the host sees abstract names.
                if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
                    return
                socket.send_fds(connection, [b"0"], [0])
            # The writer of a pipe must learn that rank 0 has ended, so only rank 0 may hold it.
            empty = os.open(os.devnull, os.O_RDONLY)
            os.dup2(empty, 0)
            os.close(empty)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def input_is_elsewhere() -> bool:
    """Return whether standard input is a terminal that reads for another, foreground process."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not the terminal that controls this process
        return False


@contextmanager
def caught_signals() -> Iterator[tuple[int, list[int]]]:
    """Collect the signals that end the job, and those for the ranks.

    Signals that this command was started to ignore, as by nohup, stay ignored.

    Yields:
        A descriptor that is readable after a signal, and the list of signals.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *_FOR_RANKS)
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


class _Launcher:
    """The launcher while it runs, and the signals that are to end it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # In a session of its own, the launcher does not get Ctrl-C from the terminal: only this
        # command does.
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            # Launchers read all they can get, also input that belongs to a shell loop around us.
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.pid = self._process.pid
        self.handle = os.pidfd_open(self.pid)
        self.send = self._process.send_signal
        self._due: list[tuple[float, int]] = []

    def status(self) -> int | None:
        """Return the exit status, or None while the launcher runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self, first: int) -> None:
        """Plan the end: a signal now, then SIGTERM, then SIGKILL to every process."""
        due = time.monotonic()
        self._due = [(due, first)]
        if first != signal.SIGTERM:
            due += _INTERRUPT_S
            self._due.append((due, signal.SIGTERM))
        self._due.append((due + _TERMINATE_S, signal.SIGKILL))

    def end_now(self) -> None:
        """Plan SIGKILL for now."""
        self._due = [(0.0, signal.SIGKILL)]

    def send_due(self) -> bool:
        """Send the planned signals that are due. Return whether SIGKILL is."""
        while self._due and self._due[0][0] <= time.monotonic():
            number = self._due.pop(0)[1]
            if number == signal.SIGKILL:
                return True
            self.send(number)
        return False


def run_job(
    command: Sequence[str],
    environment: Mapping[str, str],
    signals: tuple[int, list[int]],
    *,
    failed: Callable[[], bool],
    ended: Callable[[], bool],
    timeout_s: float | None = None,
    standard_input: StandardInput | None = None,
    passed_on: Sequence[int] = (),
) -> Result:
    """Run a launcher until it and every process that it started have ended.

    Args:
        command: Command line of the launcher.
        environment: Environment of the launcher.
        signals: The value of :func:`caught_signals`.
        failed: Returns whether a rank has failed. The launcher must then end soon.
        ended: Returns whether all ranks have ended. Processes that they left are then killed, so
            that the launcher does not wait for them.
        timeout_s: Limit of the whole job; None for no limit.
        standard_input: The standard input for rank 0; None if rank 0 gets an empty one.
        passed_on: Signals that the launcher sends on to its ranks. Others would end it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # descendants stay ours when their own parents end
    ending, number, over_at = Ending.ITSELF, 0, 0.0
    started = time.monotonic()
    wakeup, received = signals
    launcher = _Launcher(command, environment)
    handles = [launcher.handle, wakeup]
    if standard_input is not None:
        handles.append(standard_input.handle)
    dropped: set[int] = set()
    try:
        while (status := launcher.status()) is None:
            readable, _, _ = select.select(handles, [], [], _TICK_S)
            if wakeup in readable:
                os.read(wakeup, 64)
            if standard_input is not None and standard_input.handle in readable:
                standard_input.hand_over()
            _reap(but=launcher.pid)
            while received:
                if received[0] in _FOR_RANKS:
                    if (told := received.pop(0)) in passed_on:
                        launcher.send(told)
                    continue
                again, number = number, received.pop(0)
                launcher.end_now() if again else launcher.end(number)
                ending = Ending.SIGNAL
            now = time.monotonic()
            if ending is Ending.ITSELF:
                if timeout_s is not None and now - started > timeout_s:
                    ending = Ending.TIMEOUT
                    launcher.end(signal.SIGTERM)
                elif not over_at:
                    over_at = now if failed() or ended() else 0.0
                elif now - over_at > _OVER_S:
                    if failed():
                        ending = Ending.STUCK
                        launcher.end(signal.SIGTERM)
                    else:
                        own = {launcher.pid, *_descendants(launcher.pid)}
                        dropped |= _kill(set(_descendants(os.getpid())) - own)
            if launcher.send_due():
                break
    finally:
        if launcher.status() is not None:
            _wait_for_descendants(_LEAVE_S)
        killed, alive = _kill_descendants()
        os.close(launcher.handle)
    sys.stdout.flush()
    status = 128 + signal.SIGKILL if status is None else status
    return Result(ending, status, number, len(dropped | killed), alive)


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


def _descendants(top: int) -> list[int]:
    """Return the living descendants of a process, parents first."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # The process may end meanwhile. /proc may hide processes of other users.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    # The name before the last parenthesis may hold anything.
                    state, parent = file.read().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(name), state))
    found: list[int] = []
    queue = [top]
    while queue:
        born = children.get(queue.pop(0), [])
        found += [pid for pid, state in born if state not in "ZX"]
        queue += [pid for pid, _ in born]
    return found


def _kill(pids: set[int]) -> set[int]:
    """Send SIGKILL to processes, and return them.

    A process that has ended keeps its number until its parent reaps it. For orphans, that parent is
    this process, so the number does not belong to another process yet.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _reap(but: int = 0) -> None:
    """Collect the children of this process that have ended.

    Args:
        but: A child that is not collected. Once it has ended, no others are either.
    """
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, 0)


def _wait_for_descendants(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    _reap()
    while _descendants(os.getpid()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        _reap()


def _kill_descendants() -> tuple[set[int], int]:
    """Kill every descendant, and the processes that they start meanwhile.

    Returns:
        The killed processes, and the number of processes that still exist.
    """
    deadline = time.monotonic() + _KILL_S
    killed: set[int] = set()
    while alive := _descendants(os.getpid()):
        killed |= _kill(set(alive))
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
        _reap()
    _reap()
    return killed, len(alive)
