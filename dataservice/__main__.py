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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from dataservice.config import DispatcherConfig, WorkerConfig
from dataservice.server import DispatchServer, WorkerServer
from mpidist.errors import Error

_PROTOCOL = "tcp"
_LOOK_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Local. Run the command line; returns when SIGTERM or SIGINT (Ctrl-C) comes.

    Args:
        arguments: What follows the command's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit status: 0 after a signal, 1 if the server cannot start.
    """
    namespace = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for number in _SIGNALS:
        signal.signal(number, _give_up)
    try:
        if namespace.role == "dispatcher":
            _dispatch(namespace)
        else:
            _work(namespace)
    except KeyboardInterrupt:
        return 0
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
    with DispatchServer(config) as server, _signals() as wait:
        print(server.target, flush=True)
        wait(server)


def _work(namespace: argparse.Namespace) -> None:
    config = WorkerConfig(
        dispatcher_address=namespace.dispatcher,
        worker_address=namespace.worker_address,
        port=namespace.port,
        protocol=_PROTOCOL,
    )
    with WorkerServer(config) as server, _signals() as wait:
        print(f"a worker of {namespace.dispatcher}", flush=True)
        wait(server)


def _give_up(_number: int, _frame: FrameType | None) -> None:
    """End a server that is still starting; more signals must not disturb that."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _signals() -> Iterator[Callable[[DispatchServer | WorkerServer], None]]:
    """From here on, signals only end a wait, which this gives; more of them disturb nothing.

    The wait is for a signal, or for the end of a server that has failed, whose error it raises.

    An exception from a handler can come where it is lost, in a finalizer, or where it leaves a lock
    held, on the way into a wait: then the server would not end.
    """
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: None)

    def wait(server: DispatchServer | WorkerServer) -> None:
        while not select.select([reading], [], [], _LOOK_S)[0]:
            if server.stopped:
                server.join()

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


if __name__ == "__main__":
    sys.exit(main())
