"""A function that runs in processes of its own, where Python's lock holds up nobody else.

Not by :mod:`multiprocessing`, whose processes run the main script again, or are forks of one that
MPI has started in; neither is safe under a launcher.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

import cloudpickle

from dataservice.dataset import tree
from dataservice.errors import pack_error, unpack_error
from mpidist.errors import UnavailableError

_LENGTH = struct.Struct("<Q")
# Ctrl-C in a terminal reaches all its processes; a helper ends with the process that reads from it.
_MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from dataservice.dataset.processes import main; main()"
)
# By which a launcher tells a process that it is a rank.
_OF_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "MPI_LOCAL")


class Processes:
    """Local. Calls a function in processes; each does one call at a time.

    Args:
        function: The function, which cloudpickle carries.
        count: How many processes; each starts with the first call that finds none idle.
    """

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        self._function = cloudpickle.dumps(function)
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(None)
        self._all: list[_Process] = []
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, *arguments: Any) -> Any:
        """Local. What the function gives; from any thread.

        Raises:
            UnavailableError: The process ended, for instance for want of memory.
            Exception: What the function raises, with its traceback as a note.
        """
        process = self._idle.get()
        try:
            process = process or self._start()
            return process.call(arguments)
        except UnavailableError:
            process = None  # the next call starts another
            raise
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Local. End the processes, whatever they do."""
        with self._lock:
            self._closed = True
            for process in self._all:
                process.close()

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise UnavailableError("the processes of map have been closed")
            process = _Process(self._function)
            self._all.append(process)
            return process


class _Process:
    def __init__(self, function: bytes) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
        environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        _send(self._process.stdin, function)

    def call(self, arguments: tuple[Any, ...]) -> Any:
        try:
            _send(self._process.stdin, cloudpickle.dumps(arguments, protocol=5))
            well, result = pickle.loads(_receive(self._process.stdout))
        except (OSError, ValueError, EOFError) as error:
            self.close()
            raise UnavailableError(
                f"a process of map ended with status {self._process.wait()} during a call (-9, "
                "a SIGKILL, usually means that the host ran out of memory)"
            ) from error
        if well:
            return result
        raise unpack_error(result)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # what was not sent is not wanted any more
                continue


def _send(stream: IO[bytes] | None, content: bytes) -> None:
    assert stream is not None
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def _receive(stream: IO[bytes] | None) -> bytes:
    assert stream is not None
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return content


def main() -> None:
    """Answer the calls of another process, until it ends.

    Calls come on standard input, and answers go to standard output.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with contextlib.suppress(EOFError, BrokenPipeError):  # the other process has ended
        _answer_calls(requests, answers)
    # Exit while the stream of answers is open. Closing it here, or at the interpreter's exit, would
    # report that the last answer cannot be written.
    os._exit(0)


def _answer_calls(requests: IO[bytes], answers: IO[bytes]) -> None:
    # The function's output must not mix with answers, nor its input with calls. Standard output was
    # a pipe when Python opened it, so it is buffered in blocks, which a killed process would lose.
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    function = pickle.loads(_receive(requests))
    while True:
        arguments = pickle.loads(_receive(requests))
        try:
            # In NumPy's form already, for Python's may not be what it was after a pickle.
            result = tree.to_numpy(function(*arguments))
            answer = cloudpickle.dumps((True, result), protocol=5)
        except BaseException as error:
            answer = cloudpickle.dumps((False, pack_error(error, "a process of map")))
        _send(answers, answer)
