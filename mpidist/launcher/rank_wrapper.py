"""Start one rank, wait for it, and record how it ended.

This process is the parent of a rank, because only the parent of a process learns how the process
ended. Otherwise the MPI launcher is the parent, and launchers do not pass their knowledge on:

* MPICH's mpiexec (5.0) does not notice that a rank calls ``os._exit(3)`` before MPI_Init. It goes
  on, and returns 15 when it is told to end. After MPI_Init it returns 3, and names no rank.
* If a signal kills a rank before MPI_Init, mpiexec ends the other ranks, and its message can name
  one of those, with their signal.
* Open MPI's ``--output tag`` holds back a prompt until its line ends, so the labels, too, are
  written here.

This process ends as the rank ends, so the launcher sees the same as without it.

Runs as ``python -I -S rank_wrapper.py RANK_VARIABLE COMMAND...``, and uses few modules, because it
starts with every rank. It writes ``exit-<rank>.json`` into the folder ``MPIDIST_RUN_DIR``::

    {"rank", "pid", "host", "signal" | null, "exit_code" | null, "terminated", "time"}

``terminated`` is true if the launcher told the rank to end: then another rank is the cause. Further
variables:

* ``MPIDIST_RUN_LABELS``: jobs and numbers of tasks in rank order, ``ps:1,worker:3``, or ``:4`` if
  only the ranks know their jobs. Each line of the rank then begins with its task. Empty for no
  labels.
* ``MPIDIST_RUN_STDIN``: name of the socket that gives rank 0 its standard input (see
  :func:`mpidist.launcher.job.listen_for_rank_0`). The other ranks, and rank 0 where the name is
  empty, get ``/dev/null``: from launchers some ranks get a pipe that never ends.
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Signals for the rank, which has them already: launchers send them to the whole process group.
_OF_RANK = (signal.SIGUSR1, signal.SIGUSR2)
_ALL = (*_FORWARDED, *_OF_RANK)
_SAME_SIGNAL_S = 0.05
# An unterminated line is written after this time, or at this length: it may be a prompt.
_UNTERMINATED_S = 0.5
_LONGEST_BYTES = 1 << 20
# Processes that the rank has started may hold its output open after its end. When the limit has
# passed, one more read gets all that the rank has written.
_LAST_LINES_S = 1.0
_PIPE_BYTES = 65536  # capacity of a pipe (pipe(7))
_STDIN_S = 30.0
_MONITOR_S = 0.5


class _LabelledOutput:
    """Copies one output of the rank, line by line, with the name of the task before each line.

    Args:
        output: The descriptor to write to. The rank writes to :attr:`inner`.
        rank: The rank.
        name: Name of the task, until the rank's own record has it.
    """

    def __init__(self, output: int, rank: str, name: str) -> None:
        import threading  # few jobs have labels, and every rank would wait for the import

        self._output = output
        self._record = os.path.join(os.environ["MPIDIST_RUN_DIR"], f"rank-{rank}.json")
        self._name = name
        self._is_final = False
        self._ends_at = float("inf")
        self._reading, self.inner = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Start copying, after the rank has been forked."""
        os.close(self.inner)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last lines, for any time while the reader of the output is slow."""
        self._ends_at = time.monotonic() + _LAST_LINES_S
        self._thread.join()

    def _copy(self) -> None:
        import select

        held = b""
        try:
            is_last = False
            while not is_last:
                is_last = time.monotonic() >= self._ends_at
                wait_s = 0.0 if is_last else _UNTERMINATED_S
                if select.select([self._reading], [], [], wait_s)[0]:
                    data = os.read(self._reading, _PIPE_BYTES)
                    *lines, held = (held + data).split(b"\n")
                    is_last = is_last or not data
                    if held and (is_last or len(held) > _LONGEST_BYTES):
                        lines, held = [*lines, held], b""
                    self._write(lines)
                elif held:
                    self._write([held])
                    held = b""
        except OSError:  # the reader has left; the rank gets SIGPIPE as if it wrote there itself
            os.close(self._reading)

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            label = f"[{self._task()}] ".encode()
            text = b"".join([label + line + b"\n" for line in lines])
            while text:
                text = text[os.write(self._output, text) :]

    def _task(self) -> str:
        if not self._is_final:
            try:
                with open(self._record, encoding="utf-8") as file:
                    record = json.load(file)
            except OSError:  # the rank has not started MPI yet
                return self._name
            if record.get("job") is not None and record.get("task") is not None:
                self._name, self._is_final = f"{record['job']} {record['task']}", True
        return self._name


def _labelled_outputs(rank: str) -> list[_LabelledOutput]:
    """Return standard output and standard error of the rank; [] without labels."""
    jobs = os.environ.pop("MPIDIST_RUN_LABELS", "")
    if not jobs:
        return []
    job, task = "", int(rank)
    for item in jobs.split(","):
        job, _, count = item.rpartition(":")
        if task < int(count):
            break
        task -= int(count)
    name = f"{job} {task}" if job else f"rank {rank}"
    return [_LabelledOutput(output, rank, name) for output in (1, 2)]


def _take_standard_input(rank: str) -> None:
    """Replace standard input by the descriptor that the rank is to inherit."""
    source = os.environ.pop("MPIDIST_RUN_STDIN", "")
    if not source or rank != "0":
        _empty_standard_input()
        return
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_STDIN_S)
            connection.connect(f"\0{source}")
            (given,) = socket.recv_fds(connection, 1, 1)[1]
    except (OSError, ValueError) as error:
        reason = (
            "--stdin needs rank 0 on the host of mpidist run; put that host first in --hosts or "
            f"--hostfile, or let the script open a file ({error})"
        )
        _write_record("failure", rank, os.getpid(), time.time(), reason=reason, exit_code=1)
        os._exit(1)
    os.dup2(given, 0)
    os.close(given)


def _empty_standard_input() -> None:
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


def _become_rank(
    command: list[str], wrapper: int, libc: ctypes.CDLL, outputs: list[_LabelledOutput]
) -> None:
    """Execute the command in this forked process."""
    for number, output in enumerate(outputs, 1):
        os.dup2(output.inner, number)
    # A launcher may kill the wrapper alone, and the rank must not outlive it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != wrapper:
        os._exit(1)
    # Python ignores the last two.
    for number in (*_ALL, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _write_record(kind: str, rank: str, pid: int, ended: float, **facts: object) -> None:
    """Write a record of the rank as a whole or not at all."""
    record = {"rank": int(rank), "pid": pid, "host": socket.gethostname(), "time": ended, **facts}
    path = os.path.join(os.environ["MPIDIST_RUN_DIR"], f"{kind}-{rank}.json")
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(f"{path}.new", path)


class _Monitor:
    """Monitors the rank twice a second while this process waits in waitid(2).

    * If ``look.json`` in the run folder has a new request, it writes a report on the rank.
    * If the launcher's process on this host has died, it kills the rank and its descendants. They
      have inherited the connection of that process to mpiexec, so mpiexec would wait for ever.
    * If ``job.json`` in the run folder is of a later attempt of the job, it kills them, too. This
      host was cut off from the others, which have started again without it.

    Args:
        rank: The rank.
        pid: Its process.
        launcher: The launcher's process, which started this one.
        kill_rank: Kills the rank.

    Attributes:
        is_replaced: Whether a later attempt has begun.
    """

    def __init__(self, rank: str, pid: int, launcher: int, kill_rank: Callable[[], None]) -> None:
        self._rank = rank
        self._pid = pid
        self._launcher = launcher
        self._kill_rank = kill_rank
        self._look = _File("look.json")
        self._job = _File("job.json")
        self._own_job = self._job.read_if_changed()
        self.is_replaced = False

    def start(self) -> None:
        """Start the timer."""
        signal.signal(signal.SIGALRM, self._check)
        signal.setitimer(signal.ITIMER_REAL, _MONITOR_S, _MONITOR_S)

    def stop(self) -> None:
        """Stop the timer. The process may belong to another program soon."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _check(self, _number: int, _frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            job, own = self._job.read_if_changed(), self._own_job
            if job is not None and own is not None and job["pid"] == own["pid"]:
                self.is_replaced = job["host"] == own["host"] and job["attempt"] > own["attempt"]
            if self.is_replaced or os.getppid() != self._launcher:
                self._kill()
                return
            request = self._look.read_if_changed()
            if request is not None:
                look = _rank_look("look")
                look(self._rank, self._pid, request["number"], request["stacks_signal"])
        except Exception as error:  # it would end waitid in main()
            try:
                sys.stderr.write(f"mpidist run: cannot look at rank {self._rank} ({error!r})\n")
            except OSError:
                return  # the launcher has ended
        signal.setitimer(signal.ITIMER_REAL, _MONITOR_S, _MONITOR_S)

    def _kill(self) -> None:
        try:
            children = _rank_look("descendants")(self._pid)
        finally:
            self._kill_rank()
        for child in children:
            with suppress(OSError):
                os.kill(int(child), signal.SIGKILL)


class _File:
    """A JSON file of the run folder that others replace.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self._path = os.path.join(os.environ["MPIDIST_RUN_DIR"], name)
        self._changed = 0

    def read_if_changed(self) -> dict[str, Any] | None:
        """Return the content if it has changed since the last call; None if not."""
        try:
            changed = os.stat(self._path).st_mtime_ns
            if changed == self._changed:
                return None
            with open(self._path, encoding="utf-8") as file:
                content: dict[str, Any] = json.load(file)
        except OSError:  # there is none
            return None
        self._changed = changed
        return content


def _rank_look(function: str) -> Any:
    """Return a function of ``rank_look.py``."""
    import runpy  # few jobs need it

    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_look.py")
    return runpy.run_path(place)[function]


def main(arguments: list[str]) -> None:
    """Start the rank, wait for it, record its end, and end in the same way.

    Args:
        arguments: The name of the variable that has the rank, then the command.
    """
    launcher = os.getppid()
    variable, *command = arguments
    rank = os.environ[variable]
    if not os.path.isdir(os.environ["MPIDIST_RUN_DIR"]):
        sys.exit(
            f"mpidist run: {os.environ['MPIDIST_RUN_DIR']} is not there on {socket.gethostname()}; "
            "give --run-dir a folder that all hosts share"
        )
    _take_standard_input(rank)
    outputs = _labelled_outputs(rank)
    libc = ctypes.CDLL(None)
    wrapper = os.getpid()
    received: list[int] = []
    in_time: list[int] = []  # signals that came while the rank still ran
    # Blocked until the child is known, so that each signal can be forwarded.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    child = os.fork()
    if child == 0:
        _become_rank(command, wrapper, libc, outputs)
    # Only the rank may hold its standard input, so that the writer learns when the rank closes it.
    _empty_standard_input()
    for output in outputs:
        output.start()

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            in_time.append(number)
        os.kill(child, number)  # it is a zombie at worst until it is reaped below

    for number in _FORWARDED:
        signal.signal(number, forward)
    for number in _OF_RANK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
    monitor = _Monitor(rank, child, launcher, lambda: forward(signal.SIGKILL, None))
    monitor.start()
    # Waits without reaping, so that forward() cannot reach another process with the child's number.
    seen = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    monitor.stop()
    ended = time.time()
    if seen is not None and seen.si_status != 0 and not in_time:
        time.sleep(_SAME_SIGNAL_S)  # a signal to the whole process group may reach the child first
    signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    _, status = os.waitpid(child, 0)
    for output in outputs:
        output.finish()
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    fatal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    # A signal after the end of the rank means that the launcher ends the other ranks.
    terminated = bool(in_time) or fatal in received
    facts = {"signal": fatal, "exit_code": code, "terminated": terminated}
    try:
        if not monitor.is_replaced:  # otherwise the run folder belongs to another attempt
            _write_record("exit", rank, child, ended, **facts)
    except OSError as error:  # the launcher must see the end of the rank all the same
        sys.stderr.write(f"mpidist run: cannot record how rank {rank} ended ({error})\n")
    if fatal is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own core already
        if fatal != signal.SIGKILL:
            signal.signal(fatal, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
        os.kill(wrapper, fatal)
    os._exit(128 if code is None else code)


if __name__ == "__main__":
    main(sys.argv[1:])
