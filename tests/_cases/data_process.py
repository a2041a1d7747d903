"""A process of a data service: a dispatcher, a worker or a consumer.

    python -c "from _cases.data_process import main; main()" DESCRIPTOR PARENT

The process takes orders from a connection at the descriptor: first its role, then functions to run.
It ends with the connection. Linux kills the process when its parent ends, even if the process is
stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle

import dataservice
from dataservice import DispatchServer, WorkerServer

_MAIN = "from _cases.data_process import main; main()"
_FOLDERS = (Path(dataservice.__file__).parents[1], Path(__file__).parents[1])
_PR_SET_PDEATHSIG = 1
# A busy machine takes long to start Python.
_START_S = 60.0
_LIMIT_S = 60.0
_DUMP_S = 1.0
_LOG_BYTES = 8000


class ProcessEndedError(AssertionError):
    """Raised when a process has ended before its answer."""


class Process:
    """A process of a data service, started at once. Its children end with :meth:`end`.

    Args:
        name: Name in logs.
        folder: Folder of the log.
        role: ``"dispatcher"``, ``"worker"``, or ``"plain"``. A plain process only runs functions.
        config: Configuration of the server.
        env: Variables added to the environment.

    Attributes:
        pid: The process id, which is also the id of its process group.
        last_port: The last known port of the server: the configured port, or 0, before the first
            use of :attr:`port`.
    """

    def __init__(self, name, folder, role, config=None, env=None):
        self.name = name
        self._log = folder / name
        self._role = role
        self._connection, theirs = Pipe()
        path = os.pathsep.join(map(str, _FOLDERS))
        command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid())]
        with self._log.open("ab") as log, theirs:
            # PR_SET_PDEATHSIG fires when the starting thread ends, so the start has its own thread.
            self._starter = ThreadPoolExecutor(1)
            self._process = self._starter.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, **(env or {})},
                pass_fds=[theirs.fileno()],
                process_group=0,
            ).result()
        self.pid = self._process.pid
        self.last_port = 0 if config is None else config.port
        self._ready = False
        self._send((role, config))

    @property
    def port(self):
        """The port of the server. The first use waits until the server is ready."""
        if not self._ready:
            self.last_port = self._receive(_START_S)
            self._ready = True
        return self.last_port

    def run(self, function, *arguments, limit_s=_LIMIT_S):
        """Run a function in the process and return its result.

        The function is called with the server, or in a plain process with a dict that persists
        between calls.

        Raises:
            ProcessEndedError: The process has ended.
            Exception: The error of the function.
        """
        self.begin(function, *arguments)
        return self.result(limit_s)

    def begin(self, function, *arguments):
        """Start a function in the process: the first half of :meth:`run`."""
        assert self.port is not None
        self._send(cloudpickle.dumps((function, arguments)))

    def result(self, limit_s=_LIMIT_S):
        """Return the result of the function: the second half of :meth:`run`."""
        return self._receive(limit_s)

    def signal(self, number):
        """Send a signal to the process."""
        self._process.send_signal(number)

    def dump(self):
        """Let the process write the stacks of its threads to its log, unless it is stopped."""
        before = self._log.stat().st_size
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        while self._log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self, limit_s=_LIMIT_S):
        """Let the process stop its server and exit. Return the exit status."""
        assert self.port is not None
        self._connection.close()
        try:
            return self._process.wait(limit_s)
        finally:
            self.end()

    def end(self):
        """Kill the process and its children. A second call does nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._starter.shutdown()

    @property
    def ended(self):
        """The exit status, or None while the process runs."""
        return self._process.poll()

    def resident(self):
        """Return the resident memory in bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self):
        """Return the number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self):
        """Return the number of threads, including native threads."""
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def ports(self):
        """Return the TCP ports on which the process listens."""
        return listening_ports(self.pid)

    def log(self):
        """Return the end of the log."""
        return self._log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")

    def _send(self, what):
        try:
            self._connection.send(what)
        except OSError as error:
            raise self._ended() from error

    def _receive(self, limit_s):
        assert self._connection.poll(limit_s), f"{self.name} has not answered within {limit_s:g} s"
        try:
            good, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if not good:
            error, trace = cloudpickle.loads(value)
            error.add_note(f"raised in the process {self.name}:\n{trace}")
            raise error
        return value if value is None else cloudpickle.loads(value)

    def _ended(self):
        return ProcessEndedError(f"{self.name} has ended ({self.ended}):\n{self.log()}")


def listening_ports(pid):
    """Return the TCP ports on which a process of this host listens."""
    sockets = set()
    for handle in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the file has been closed
            sockets.add(os.readlink(f"/proc/{pid}/fd/{handle}"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return sorted(int(row[1].partition(":")[2], 16) for row in listening)


def main():
    """Take the role from the parent, then run its functions until the connection closes."""
    descriptor, parent = map(int, sys.argv[1:])
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl()
        os.kill(os.getpid(), signal.SIGKILL)
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    server = None
    try:
        server = _start(*connection.recv())
        plain = isinstance(server, dict)
        _answer(connection, lambda: 0 if plain else server._endpoint.address.port)
        while True:
            function, arguments = cloudpickle.loads(connection.recv())
            _answer(connection, function, server, *arguments)
    except EOFError:
        pass
    except Exception as error:
        _answer(connection, _raise, error)
        raise
    if isinstance(server, (DispatchServer, WorkerServer)):
        server.stop()


def num_tasks(_):
    """Return the number of tasks that run in this process; for :meth:`Process.run`."""
    return sum(t.name.startswith("dataservice-task") for t in threading.enumerate())


def _start(role, config):
    if role == "plain":
        return {}
    return DispatchServer(config) if role == "dispatcher" else WorkerServer(config)


def _raise(error):
    raise error


def _answer(connection, function, *arguments):
    try:
        reply = True, cloudpickle.dumps(function(*arguments))
    except Exception as error:
        reply = False, cloudpickle.dumps((error, traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):  # the parent has closed the connection
        connection.send(reply)
