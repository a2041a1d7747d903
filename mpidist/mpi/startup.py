"""The watchdog of the start. It logs a reminder, and ends the job if a rank has ended before MPI.

A rank that ends before it has started MPI leaves the other ranks in MPI_Init for ever, and not
every launcher ends them. The ranks of its host can see that it is gone: the launcher's process
there has fewer ranks below it than it has started.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpidist.mpi.launch_env import local_size_hint, rank_hint, size_hint
from mpidist.mpi.records import Identity
from mpidist.mpi.shared_memory import unlink_mpi_files
from mpidist.mpi.shutdown import end_job

logger = logging.getLogger(__name__)

_REMINDER_S = 15.0
# A rank must be missing twice in a row, because the launcher may still be starting ranks.
_LOOK_PERIOD_S = 2.5
# Names of the processes that launchers have on each host.
_LAUNCHERS = ("hydra_", "prte", "orted")


@contextmanager
def watched_start() -> Iterator[None]:
    """Watch over a block in which this rank waits for the other ranks to start MPI."""
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(done,), name="mpidist-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def has_loaded(library: str) -> bool:
    """Return whether this process has loaded a library.

    Args:
        library: The first letters of the name of its file.
    """
    return f"/{library}" in _text_of(os.getpid(), "maps")


def missing_here() -> set[int]:
    """Return the ranks that were started on this host and have ended, as far as it can be told.

    Returns:
        The ranks; -1 stands for a rank whose number is unknown.
    """
    started = local_size_hint(os.environ)
    top = os.getpid()
    while _rank_of(top) is not None:
        top = _parent_of(top)
    if started is None or not _text_of(top, "comm").startswith(_LAUNCHERS):
        return set()
    here = {rank for pid in _descendants(top) if (rank := _rank_of(pid)) is not None}
    if len(here) >= started:
        return set()
    return set(range(started)) - here if started == size_hint(os.environ) else {-1}


def _watch(done: threading.Event) -> None:
    began, reminded, before = time.monotonic(), False, set[int]()
    while not done.wait(_LOOK_PERIOD_S):
        missing = missing_here()
        if missing & before and not done.is_set():
            rank = rank_hint(os.environ)
            gone = min(missing & before)
            name = f"rank {gone}" if gone >= 0 else "another rank on this host"
            unlink_mpi_files()
            # The process ends without MPI. A launcher ends the job when a rank fails in MPI_Init.
            end_job(
                Identity(-1 if rank is None else rank, os.getpid(), socket.gethostname()),
                f"this rank waits in MPI_Init for {name}, whose script has ended",
            )
        before = missing
        if time.monotonic() - began > _REMINDER_S and not reminded:
            reminded = True
            logger.warning(
                "rank %s has waited %.0f s for the other ranks to start MPI: every rank must, by "
                "making a process group, a resolver, a Server or an endpoint",
                rank_hint(os.environ),
                _REMINDER_S,
            )


def _descendants(top: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(_parent_of(int(name)), []).append(int(name))
    found = [top]
    for pid in found:
        found += children.get(pid, [])
    return found


def _parent_of(pid: int) -> int:
    fields = _text_of(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _rank_of(pid: int) -> int | None:
    entries = _text_of(pid, "environ").split("\0")
    return rank_hint(dict((*entry.partition("=")[::2],) for entry in entries))


def _text_of(pid: int, name: str) -> str:
    """Return a file about a process; "" if the process has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
