"""Starts one rank, waits for it and writes down how it ended.

Launchers tell little, each in its own words, of how a rank ended; the parent of the rank knows
exactly. Runs as ``python -I -S keeper.py RANK_VARIABLE COMMAND...`` and ends as the rank ends, so
that the launcher sees what it would see without it. Uses few modules, because it starts with every
rank. In the folder ``MPIDIST_RUN_DIR`` it leaves ``exit-<rank>.json``::

    {"rank", "pid", "host", "signal" | null, "exit_code" | null, "asked", "time"}

``MPIDIST_RUN_SHARED`` names the variables that hold the job's folder in /dev/shm; on a host that
does not have it they are dropped, and the MPI library takes its own place.

``asked`` says that the rank was told to end by a signal that the keeper got before, or got too: it
is a victim of the launcher's cleaning up, not a cause.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time

_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SAME_SIGNAL_S = 0.05


def _become(command: list[str], parent: int, libc: ctypes.CDLL) -> None:
    """Local. Turn this forked process into the rank."""
    # A launcher may kill the keeper alone; the rank must not outlive it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for number in (*_FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    try:
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _record(rank: str, pid: int, status: int, asked: bool, ended: float) -> None:
    """Local. Leave the record; whole or not at all."""
    folder = os.environ["MPIDIST_RUN_DIR"]
    record = {
        "rank": int(rank),
        "pid": pid,
        "host": socket.gethostname(),
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "asked": asked,
        "time": ended,
    }
    path = os.path.join(folder, f"exit-{rank}.json")
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(f"{path}.new", path)


def main(arguments: list[str]) -> None:
    """Local. Start the rank, wait, record, and end likewise.

    Args:
        arguments: The name of the variable with the rank, then the command.
    """
    variable, *command = arguments
    if not os.path.isdir(os.environ["MPIDIST_RUN_DIR"]):
        sys.exit(
            f"mpidist run: {os.environ['MPIDIST_RUN_DIR']} is not there on {socket.gethostname()}; "
            "give --run-dir a folder that all hosts share"
        )
    for name in filter(None, os.environ.pop("MPIDIST_RUN_SHARED", "").split(",")):
        if name in os.environ and not os.path.isdir(os.environ[name]):
            del os.environ[name]
    libc = ctypes.CDLL(None)
    keeper = os.getpid()
    received: list[int] = []
    asking: list[int] = []  # those that came while the rank still ran
    # Blocked until the child is known, so that no signal is forwarded to nobody.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        _become(command, keeper, libc)

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            asking.append(number)
        os.kill(child, number)  # the child is a zombie at worst until it is waited for below

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    # Waits without reaping, so that the number of the child stays its own while forward() may run.
    seen = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    ended = time.time()
    if seen is not None and seen.si_status != 0 and not asking:
        time.sleep(_SAME_SIGNAL_S)  # a signal to the whole group may reach the child first
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    _, status = os.waitpid(child, 0)
    # Any other signal comes because the rank has ended: the launcher ends the rest.
    asked = bool(asking) or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in received)
    _record(os.environ[variable], child, status, asked, ended)
    if os.WIFSIGNALED(status):
        fatal = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own core already
        if fatal != signal.SIGKILL:
            signal.signal(fatal, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        os.kill(keeper, fatal)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128)


if __name__ == "__main__":
    main(sys.argv[1:])
