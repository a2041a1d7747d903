"""One process of a data service on its own: a dispatcher, a worker or a consumer.

    python -c "from _cases.data_process import main; main()" DESCRIPTOR PARENT

It takes orders from a connection at the descriptor: first what to be, then functions to run. It
ends when the connection does, and is killed when its parent goes, even if it is stopped.
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
# A machine that is busy takes long to start Python.
_START_S = 60.0
_LIMIT_S = 60.0
_DUMP_S = 1.0
_LOG_BYTES = 8000


class ProcessEndedError(AssertionError):
    """A process has ended that should have answered."""


class Process:
    """A process of its own, begun at once; nothing that it starts outlives :meth:`end`.

    Args:
        name: In logs.
        folder: For its log.
        role: ``"dispatcher"``, ``"worker"``, or ``"plain"``, which only runs functions.
        config: Of the server.
        env: Added to the environment.

    Attributes:
        pid: Its number, and that of its process group.
        last_port: Where its server listens, or did; 0 as long as nobody has asked.
    """

    def __init__(self, name, folder, role, config=None, env=None):
        self.name = name
        self._log = folder / name
        self._role = role
        self._connection, theirs = Pipe()
        path = os.pathsep.join(map(str, _FOLDERS))
        command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(os.getpid())]
        with self._log.open("ab") as log, theirs:
            # Linux kills it with the thread that starts it, which therefore has nothing else to do.
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
        """Where its server listens; waits until it does, and a worker is known."""
        if not self._ready:
            self.last_port = self._receive(_START_S)
            self._ready = True
        return self.last_port

    def run(self, function, *arguments, limit_s=_LIMIT_S):
        """What a function gives there, called with the server, or a dict that stays, if plain.

        Raises:
            ProcessEndedError: The process has ended.
            Exception: What the function raises.
        """
        self.begin(function, *arguments)
        return self.result(limit_s)

    def begin(self, function, *arguments):
        """The first half of :meth:`run`."""
        assert self.port is not None
        self._send(cloudpickle.dumps((function, arguments)))

    def result(self, limit_s=_LIMIT_S):
        """The second half of :meth:`run`."""
        return self._receive(limit_s)

    def signal(self, number):
        """Send a signal."""
        self._process.send_signal(number)

    def dump(self):
        """Have it write where its threads are to its log, unless it stands still."""
        before = self._log.stat().st_size
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        while self._log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self, limit_s=_LIMIT_S):
        """Have it end by itself; how it ended. It stops its server, and leaves Python."""
        assert self.port is not None
        self._connection.close()
        try:
            return self._process.wait(limit_s)
        finally:
            self.end()

    def end(self):
        """Kill it and all that it started; a second call does nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._starter.shutdown()

    @property
    def ended(self):
        """How it has ended; None as long as it runs."""
        return self._process.poll()

    def resident(self):
        """Resident bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self):
        """How many files it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self):
        """How many threads it has, of any kind."""
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def ports(self):
        """The tcp ports at which it listens."""
        return listening_ports(self.pid)

    def log(self):
        """The end of what it has written."""
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
    """The tcp ports at which a process of this host listens."""
    sockets = set()
    for handle in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            sockets.add(os.readlink(f"/proc/{pid}/fd/{handle}"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return sorted(int(row[1].partition(":")[2], 16) for row in listening)


def main():
    """Be what the parent says, and do what it says, until it closes the connection."""
    descriptor, parent = map(int, sys.argv[1:])
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has gone before it could be tied to
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
    """How many tasks run in this process; for :meth:`Process.run`."""
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
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        connection.send(reply)
