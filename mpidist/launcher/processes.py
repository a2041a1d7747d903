"""Processes of this host as /proc shows them: whose children they are, and ending them for sure."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01


def _prctl(option: int, value: int) -> None:
    """Local. The system call of that name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


def adopt_orphans() -> None:
    """Local. Become the parent of every descendant whose own parent ends.

    So a process that a launcher leaves behind stays a descendant, and is found by
    :func:`descendants`.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Local. Have the kernel send SIGTERM to this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True)
class Process:
    """One process for good: a number may be given to another process later, its start not.

    Attributes:
        pid: Its number.
        parent: Its parent's number when it was read.
        state: The letter of its state; ``Z`` has ended and waits to be reaped.
        started: When it started, in clock ticks since the host did.
    """

    pid: int
    parent: int
    state: str
    started: int

    @classmethod
    def read(cls, pid: int) -> Process | None:
        """Local. The process that has this number now.

        Args:
            pid: The number.

        Returns:
            The process, or None if there is none.
        """
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                # The name, in parentheses, may hold anything.
                fields = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None  # there is none, or it is another user's, of whom /proc tells nothing
        return cls(pid, int(fields[1]), fields[0], int(fields[19]))

    def send(self, number: int) -> bool:
        """Local. Send a signal to this process and no other.

        Args:
            number: The signal.

        Returns:
            Whether the process was there.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            now = Process.read(self.pid)
            if now is None or now.started != self.started:
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def descendants(pid: int | None = None) -> list[Process]:
    """Local. The living children of a process, their children, and so on.

    Args:
        pid: The process; by default this one.

    Returns:
        The processes, parents first.
    """
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        process = Process.read(int(name)) if name.isdigit() else None
        if process is not None:
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [os.getpid() if pid is None else pid]
    while queue:
        born = children.get(queue.pop(0), [])
        found += [process for process in born if process.state not in "ZX"]
        queue += [process.pid for process in born]
    return found


def reap(but: int = 0) -> None:
    """Local. Collect the children of this process that have ended.

    Args:
        but: The number of one that somebody else collects; once it has ended, no more are.
    """
    with contextlib.suppress(ChildProcessError):  # there are no children at all
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, 0)


def wait_descendants(timeout_s: float) -> None:
    """Local. Wait until there are no descendants, or the time has passed.

    Args:
        timeout_s: How long.
    """
    deadline = time.monotonic() + timeout_s
    reap()
    while descendants() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        reap()


def kill_descendants(timeout_s: float) -> tuple[set[int], int]:
    """Local. SIGKILL every descendant, and those they had started meanwhile.

    Args:
        timeout_s: How long to wait for them to end.

    Returns:
        The numbers of those that were there, and how many still are.
    """
    deadline = time.monotonic() + timeout_s
    hit: set[int] = set()
    while alive := descendants():
        for process in alive:
            process.send(signal.SIGKILL)
            hit.add(process.pid)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
        reap()
    reap()
    return hit, len(alive)
