"""Starts one rank, waits for it and writes down how it ended.

Launchers tell little, each in its own words, of how a rank ended; the parent of the rank knows
exactly. Runs as ``python -I -S keeper.py RANK_VARIABLE COMMAND...`` and ends as the rank ends, so
that the launcher sees what it would see without it. Uses few modules, because it starts with every
rank. In the folder ``MPIDIST_RUN_DIR`` it leaves ``exit-<rank>.json``::

    {"rank", "pid", "host", "signal" | null, "exit_code" | null, "asked", "time"}

``MPIDIST_RUN_SHARED`` names the variables that hold the job's folder in /dev/shm; on a host that
does not have it they are dropped, and the MPI library takes its own place.

``MPIDIST_RUN_LABELS`` asks for the rank's lines to begin with the task they are from; it has the
jobs in the order of their ranks, and how many each has: ``ps:1,worker:3``, or ``:4`` where jobs are
not known before the ranks are.

``MPIDIST_RUN_STDIN`` names the socket that gives rank 0 its standard input (see
:mod:`mpidist.launcher.standard_input`). All other ranks, and rank 0 where the name is empty, get
``/dev/null``: from launchers some ranks get a pipe that never ends. Where the variable is not set,
the rank inherits standard input.

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
# The rank knows what they mean. Launchers send them to the whole group, so it has them already.
_OF_RANK = (signal.SIGUSR1, signal.SIGUSR2)
_ALL = (*_FORWARDED, *_OF_RANK)
_SAME_SIGNAL_S = 0.05
# A line that is not ended so long, or longer, is handed on as if it were: who asks for an answer on
# the same line is waiting for it.
_UNFINISHED_S = 0.5
_LONGEST_BYTES = 1 << 20
# What the rank has started may hold its output open after it has ended.
_LAST_LINES_S = 1.0
_STDIN_S = 30.0


class _Labelled:
    """Local. Hands on one of a rank's outputs, whole lines, each behind the name of the task.

    Args:
        output: The descriptor to write to; the rank's own is to be :attr:`inner`.
        rank: The rank.
        name: Of the task, until the rank itself has said which it is.
    """

    def __init__(self, output: int, rank: str, name: str) -> None:
        import threading  # few jobs need it, and every rank would wait for it

        self._output = output
        self._record = os.path.join(os.environ["MPIDIST_RUN_DIR"], f"rank-{rank}.json")
        self._name = name
        self._known = False
        self._reading, self.inner = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def start(self) -> None:
        """Local. Begin, after the rank has been forked."""
        os.close(self.inner)
        self._thread.start()

    def finish(self) -> None:
        """Local. Wait for the last lines."""
        self._thread.join(_LAST_LINES_S)

    def _relay(self) -> None:
        import select

        held = b""
        try:
            while True:
                wait_s = _UNFINISHED_S if held else None
                if select.select([self._reading], [], [], wait_s)[0]:
                    data = os.read(self._reading, 65536)
                    *lines, held = (held + data).split(b"\n")
                    if held and (not data or len(held) > _LONGEST_BYTES):
                        lines, held = [*lines, held], b""
                    self._write(lines)
                    if not data:
                        return
                else:
                    self._write([held])
                    held = b""
        except OSError:  # nobody reads: the rank is to learn it as if it wrote there itself
            os.close(self._reading)

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            label = f"[{self._task()}] ".encode()
            text = b"".join([label + line + b"\n" for line in lines])
            while text:
                text = text[os.write(self._output, text) :]

    def _task(self) -> str:
        if not self._known:
            try:
                with open(self._record, encoding="utf-8") as file:
                    record = json.load(file)
            except OSError:  # the rank has not come so far
                return self._name
            if record.get("job") is not None and record.get("task") is not None:
                self._name, self._known = f"{record['job']} {record['task']}", True
        return self._name


def _labelled(rank: str) -> list[_Labelled]:
    """Local. Both outputs of the rank, if its lines are to be labelled."""
    runs = os.environ.pop("MPIDIST_RUN_LABELS", "")
    if not runs:
        return []
    job, task = "", int(rank)
    for run in runs.split(","):
        job, _, count = run.rpartition(":")
        if task < int(count):
            break
        task -= int(count)
    name = f"{job} {task}" if job else f"rank {rank}"
    return [_Labelled(output, rank, name) for output in (1, 2)]


def _take_standard_input(rank: str) -> None:
    """Replace standard input by the one that the rank shall inherit."""
    source = os.environ.pop("MPIDIST_RUN_STDIN", None)
    if source is None:
        return
    if source and rank == "0":
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_STDIN_S)
                connection.connect(f"\0{source}")
                (given,) = socket.recv_fds(connection, 1, 1)[1]
        except (OSError, ValueError) as error:
            reason = (
                "--stdin needs rank 0 on the host of mpidist run; put that host first in --hosts "
                f"or --hostfile, or let the script open a file ({error})"
            )
            facts = {"rank": 0, "pid": os.getpid(), "host": socket.gethostname()}
            facts |= {"reason": reason, "exit_code": 1, "time": time.time()}
            _write("failure-0.json", facts)
            os._exit(1)
    else:
        given = os.open(os.devnull, os.O_RDONLY)
    os.dup2(given, 0)
    os.close(given)


def _drop_standard_input() -> None:
    """Stop holding the rank's standard input, so that its writer learns when the rank closes it."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


def _become(command: list[str], parent: int, libc: ctypes.CDLL, outputs: list[_Labelled]) -> None:
    """Local. Turn this forked process into the rank."""
    for number, output in enumerate(outputs, 1):
        os.dup2(output.inner, number)
    # A launcher may kill the keeper alone; the rank must not outlive it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    for number in (*_ALL, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _record(rank: str, pid: int, status: int, asked: bool, ended: float) -> None:
    """Leave the record of how the rank ended."""
    record = {
        "rank": int(rank),
        "pid": pid,
        "host": socket.gethostname(),
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "asked": asked,
        "time": ended,
    }
    _write(f"exit-{rank}.json", record)


def _write(name: str, record: dict[str, object]) -> None:
    """Write a record; whole or not at all."""
    path = os.path.join(os.environ["MPIDIST_RUN_DIR"], name)
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
    _take_standard_input(os.environ[variable])
    outputs = _labelled(os.environ[variable])
    libc = ctypes.CDLL(None)
    keeper = os.getpid()
    received: list[int] = []
    asking: list[int] = []  # those that came while the rank still ran
    # Blocked until the child is known, so that no signal is forwarded to nobody.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    child = os.fork()
    if child == 0:
        _become(command, keeper, libc, outputs)
    _drop_standard_input()
    for output in outputs:
        output.start()

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            asking.append(number)
        os.kill(child, number)  # the child is a zombie at worst until it is waited for below

    for number in _FORWARDED:
        signal.signal(number, forward)
    for number in _OF_RANK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
    # Waits without reaping, so that the number of the child stays its own while forward() may run.
    seen = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    ended = time.time()
    if seen is not None and seen.si_status != 0 and not asking:
        time.sleep(_SAME_SIGNAL_S)  # a signal to the whole group may reach the child first
    signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    _, status = os.waitpid(child, 0)
    for output in outputs:
        output.finish()
    # Any other signal comes because the rank has ended: the launcher ends the rest.
    asked = bool(asking) or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in received)
    try:
        _record(os.environ[variable], child, status, asked, ended)
    except OSError as error:  # the launcher is to see how the rank ended all the same
        rank = os.environ[variable]
        sys.stderr.write(f"mpidist run: cannot record how rank {rank} ended ({error})\n")
    if os.WIFSIGNALED(status):
        fatal = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own core already
        if fatal != signal.SIGKILL:
            signal.signal(fatal, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
        os.kill(keeper, fatal)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128)


if __name__ == "__main__":
    main(sys.argv[1:])
