"""Functions that run in helper processes, where Python's lock holds up no other thread.

The helpers are shared by all passes of this process. They are no processes of
:mod:`multiprocessing`, which run the main script again, or are forks of a process in which MPI has
started; neither is safe under a launcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from io import TextIOWrapper
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from dataservice.dataset import tree
from dataservice.errors import pack_error, unpack_error
from mpidist.errors import UnavailableError

# Ctrl-C in a terminal reaches all its processes; a helper ends with the process that reads from it.
_MAIN = (
    # Launchers send both to the whole process group. SIGUSR1 tells the rank to save.
    "import signal; [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, "
    "signal.SIGUSR1)]; "
    "from dataservice.dataset.processes import main; main()"
)
# The variables by which a launcher tells a process that it is a rank begin so.
_OF_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "MPI_LOCAL")
# A helper keeps as many functions as it got last, for passes that take turns.
_KEPT = 8


class RemoteFunction:
    """A function of one pass that the helpers call.

    Args:
        function: The function, which cloudpickle carries.
        count: The number of helpers that there shall be at least.
    """

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        self.pickle = cloudpickle.dumps(function)
        self.digest = hashlib.sha256(self.pickle).digest()
        self.count = count
        _HELPERS.open(self)

    def __call__(self, *arguments: Any) -> Any:
        """Return the function's result; from any thread.

        Raises:
            UnavailableError: The helper ended, for instance for want of memory.
            Exception: The error of the function, with its traceback as a note.
        """
        with _HELPERS.borrow(self) as helper:
            return helper.call(self, arguments)

    def close(self) -> None:
        """End the calls that are running, together with their helpers; idempotent."""
        _HELPERS.close(self)


class _Helpers:
    """The helpers of this process, as many as the largest pass asks for.

    A helper starts with the first call that finds none idle. All end with the last pass.
    """

    def __init__(self) -> None:
        # Its lock is reentrant, for garbage may be collected anywhere, and close a pass.
        self._changed = threading.Condition()
        self._functions: set[RemoteFunction] = set()
        self._idle: list[_Helper] = []
        self._busy: dict[_Helper, RemoteFunction] = {}

    def open(self, function: RemoteFunction) -> None:
        with self._changed:
            self._functions.add(function)

    @contextlib.contextmanager
    def borrow(self, function: RemoteFunction) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: function not in self._functions or self._is_one_free())
            if function not in self._functions:
                raise UnavailableError("the processes of map have been closed")
            helper = self._idle.pop() if self._idle else _Helper()
            self._busy[helper] = function
        try:
            yield helper
        finally:
            with self._changed:
                del self._busy[helper]
                if self._functions and helper.is_alive:
                    self._idle.append(helper)
                else:
                    helper.close()
                self._changed.notify_all()

    def close(self, function: RemoteFunction) -> None:
        with self._changed:
            self._functions.discard(function)
            for helper, called in list(self._busy.items()):
                if called is function:
                    helper.kill()  # the thread of the call sees its end, and closes it
            while self._idle and not self._functions:
                self._idle.pop().close()
            self._changed.notify_all()

    def _is_one_free(self) -> bool:
        most = max(function.count for function in self._functions)
        return bool(self._idle) or len(self._busy) < most


class _Helper:
    def __init__(self) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
        environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        ours, theirs = socket.socketpair()
        with theirs:
            # Functions write to standard error, for a program may read this rank's output.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN], env=environ, stdin=theirs.fileno(), stdout=2
            )
        self._line = Connection(ours.detach())
        # The helper forgets functions in the same order.
        self._known: deque[bytes] = deque(maxlen=_KEPT)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, function: RemoteFunction, arguments: tuple[Any, ...]) -> Any:
        known = function.digest in self._known
        parts = (function.digest, None if known else function.pickle, arguments)
        request = cloudpickle.dumps(parts, protocol=5)
        try:
            self._line.send_bytes(request)
            answer = self._line.recv_bytes()
        except (OSError, EOFError) as error:
            self.kill()
            raise UnavailableError(
                f"a process of map ended with status {self._process.wait()} during a call (-9, "
                "a SIGKILL, usually means that the host ran out of memory)"
            ) from error
        except BaseException:
            self.kill()  # an interrupted call must not leave its answer to the next one
            raise
        if not known:
            self._known.append(function.digest)
        well, result = pickle.loads(answer)
        if well:
            return result
        raise unpack_error(result)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._line.close()


_HELPERS = _Helpers()


def main() -> None:
    """Answer the calls of another process over standard input, until that process ends."""
    line = Connection(os.dup(0))
    # The function's input must not mix with calls; its output must not be lost in a buffer when the
    # helper is killed.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    with contextlib.suppress(EOFError, ConnectionError):  # the other process has ended
        _answer_calls(line)
    # At its exit, the interpreter would report that standard error has no reader any more.
    os._exit(0)


def _answer_calls(line: Connection) -> None:
    functions: dict[bytes, Callable[..., Any]] = {}
    while True:
        digest, function, arguments = pickle.loads(line.recv_bytes())
        if function is not None:
            if len(functions) == _KEPT:
                del functions[next(iter(functions))]
            functions[digest] = pickle.loads(function)
        try:
            # In NumPy's form already, for Python's may not be what it was after a pickle.
            result = tree.to_numpy(functions[digest](*arguments))
            answer = cloudpickle.dumps((True, result), protocol=5)
        except BaseException as error:
            answer = cloudpickle.dumps((False, pack_error(error, "a process of map")))
        line.send_bytes(answer)
