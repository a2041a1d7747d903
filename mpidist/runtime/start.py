"""While the ranks wait for each other to start MPI: a reminder, and an end if one never will.

A rank that ends before it has started MPI leaves the others in MPI_Init for ever, and not every
launcher ends them. Those on its host can see that it is gone: fewer ranks hang on the launcher's
process there than it has started.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from mpidist.runtime import records, streams
from mpidist.runtime.launch import launcher_of, local_size_hint, rank_hint, size_hint

logger = logging.getLogger(__name__)

_REMINDER_S = 15.0
# A rank must be missing twice in a row: the launcher may be in the midst of starting the ranks.
_LOOK_PERIOD_S = 2.5
# How the processes are called that launchers have on each host.
_LAUNCHERS = ("hydra_", "prte", "orted")


@contextmanager
def watched() -> Iterator[None]:
    """Local. Watch over a block in which this rank waits for all others to start MPI."""
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(done,), name="mpidist-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def unlink_shared_memory() -> None:
    """Local. Remove the names of MPI's files in /dev/shm that this process has mapped.

    MPICH removes its file only at MPI_Finalize, so that every killed or aborted job would leave
    one behind. Mappings live on without the name. Open MPI's segments are opened by peers at the
    first message, and its launcher removes them; a rank that is alone removes its own, as it is
    without a launcher or under MPICH's.
    """
    prefixes = ["/dev/shm/mpich_shm_"]
    if launcher_of(os.environ) in (None, "hydra"):
        prefixes.append("/dev/shm/sm_segment.")
    names = {line.split()[-1] for line in _text_of(os.getpid(), "maps").splitlines()}
    for name in sorted(names):
        if name.startswith(tuple(prefixes)):
            try:
                os.unlink(name)
            except FileNotFoundError:
                continue  # a node-mate was first


def has_loaded(library: str) -> bool:
    """Local. Whether this process has loaded a library whose file's name begins like that."""
    return f"/{library}" in _text_of(os.getpid(), "maps")


def missing_here() -> set[int]:
    """Local. Ranks that were started on this host and are gone, as far as that can be told.

    Returns:
        The ranks; -1 for one of unknown number.
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
            _end(min(missing & before))
        before = missing
        if time.monotonic() - began > _REMINDER_S and not reminded:
            reminded = True
            logger.warning(
                "rank %s has waited %.0f s for the other ranks to start MPI: every rank must, by "
                "making a process group, a resolver, a Server or an endpoint",
                rank_hint(os.environ),
                _REMINDER_S,
            )


def _end(missing: int) -> NoReturn:
    """Local. End this process; a launcher ends the job when a rank fails in MPI_Init."""
    rank = rank_hint(os.environ)
    identity = records.Identity(-1 if rank is None else rank, os.getpid(), socket.gethostname())
    name = f"rank {missing}" if missing >= 0 else "another rank on this host"
    reason = f"it waits for {name} to start MPI, whose script has ended"
    sys.stderr.write(f"mpidist: {identity} ends the job: {reason}\n")
    sys.stderr.flush()
    records.write_failure(identity, reason, "", 1)
    unlink_shared_memory()
    streams.wait_until_read(2)
    os._exit(1)


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
    """Local. A file about a process; empty where it has ended, or is somebody else's."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
