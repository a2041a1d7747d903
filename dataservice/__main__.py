"""A dispatcher or a data worker as a plain process, over tcp.

python -m dataservice dispatcher --port 5050 --work-dir journal
python -m dataservice worker --dispatcher localhost:5050
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from dataservice.options import DispatcherConfig, WorkerConfig
from dataservice.server import DispatchServer, WorkerServer
from mpidist.errors import CancelledError, Error, FailedPreconditionError

_PROTOCOL = "tcp"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NO_SIGNAL = b"\0"  # the wakeup file descriptor gets the number of a signal, which is never 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns when SIGTERM or SIGINT (Ctrl-C) comes.

    Args:
        arguments: What follows the command's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit status: 0 after a signal, 1 if the server cannot start.
    """
    namespace = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        if namespace.role == "dispatcher":
            _dispatch(namespace)
        else:
            _work(namespace)
    except (Error, ValueError) as error:
        print(f"python -m dataservice {namespace.role}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataservice",
        description="Run one server of a data service, over tcp, until SIGTERM or Ctrl-C.",
        epilog="With the same MPIDIST_SECRET in the environment of all servers and trainers "
        "everything is encrypted, and other hosts are let in.",
    )
    roles = parser.add_subparsers(dest="role", metavar="dispatcher|worker", required=True)
    dispatcher = roles.add_parser("dispatcher", help="coordinates; prints its target when it is up")
    dispatcher.add_argument(
        "--work-dir", metavar="DIR", help="of a journal: one that is started again goes on from it"
    )
    worker = roles.add_parser("worker", help="makes elements; says when the dispatcher knows it")
    worker.add_argument(
        "--dispatcher", required=True, metavar="HOST:PORT", help="with or without tcp://"
    )
    worker.add_argument(
        "--worker-address", metavar="HOST:PORT", help="what others call it; %%port%% is its port"
    )
    for role in (dispatcher, worker):
        role.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    return parser


def _dispatch(namespace: argparse.Namespace) -> None:
    config = DispatcherConfig(
        port=namespace.port,
        protocol=_PROTOCOL,
        work_dir=namespace.work_dir,
        fault_tolerant_mode=namespace.work_dir is not None,
    )
    server = DispatchServer(config, start=False)
    _serve(server, lambda: server.target)


def _work(namespace: argparse.Namespace) -> None:
    config = WorkerConfig(
        dispatcher_address=namespace.dispatcher,
        worker_address=namespace.worker_address,
        port=namespace.port,
        protocol=_PROTOCOL,
    )
    _serve(WorkerServer(config, start=False), lambda: f"a worker of {namespace.dispatcher}")


def _serve(server: DispatchServer | WorkerServer, line: Callable[[], str]) -> None:
    """Start a server, print a line, and return when a signal has stopped the server.

    Args:
        server: The server, not started.
        line: Gives the text to print once the server has started.

    Raises:
        Exception: The server cannot start, or has failed.
    """
    with _stopped_by_signals(server) as signalled:
        try:
            server.start()
            text = line()
        except (CancelledError, FailedPreconditionError):
            if signalled.is_set():
                return
            raise
        print(text, flush=True)
        server.join()


@contextmanager
def _stopped_by_signals(server: DispatchServer | WorkerServer) -> Iterator[threading.Event]:
    """Stop a server at the first signal, even during its start, and at the end of the context.

    Gives an event, which is set by a signal. More signals have no effect.
    """
    # The handlers raise nothing. An exception between two steps of a start would leave a worker
    # registered that nothing stops; in a finalizer it would be lost; on the way into a wait it
    # would leave a lock held.
    signalled = threading.Event()
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def stop() -> None:
        select.select([reading], [], [])
        if os.read(reading, 1) != _NO_SIGNAL:
            signalled.set()
        server.stop()

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    with ThreadPoolExecutor(1, thread_name_prefix="dataservice-signals") as pool:
        stopping = pool.submit(stop)
        try:
            yield signalled
        finally:
            os.write(writing, _NO_SIGNAL)
            stopping.result()
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)


if __name__ == "__main__":
    sys.exit(main())
