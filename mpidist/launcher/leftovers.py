"""Processes, temporary folders and files in /dev/shm that a job may leave on this host."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import signal
import socket
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mpidist.dev_shm import SHARED_MEMORY

_POLL_S = 0.01
_KILL_S = 2.0  # for killed processes to disappear
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


# Processes. The command is the reaper of all its descendants (PR_SET_CHILD_SUBREAPER, prctl(2)).


def descendants(top: int) -> list[int]:
    """Return the living descendants of a process, parents first."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # The process may end meanwhile. /proc may hide processes of other users.
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    # The name before the last parenthesis may hold anything.
                    state, parent = file.read().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(name), state))
    found: list[int] = []
    queue = [top]
    while queue:
        born = children.get(queue.pop(0), [])
        found += [pid for pid, state in born if state not in "ZX"]
        queue += [pid for pid, _ in born]
    return found


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes.

    A process that has ended keeps its number until its parent reaps it. For orphans, that parent is
    this process, so the number does not belong to another process yet.
    """
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def reap(but: int = 0) -> None:
    """Collect the children of this process that have ended.

    Args:
        but: A child that is not collected. Once it has ended, no others are either.
    """
    with suppress(ChildProcessError):  # there are no children
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, 0)


def end_descendants(leave_s: float) -> tuple[set[int], int]:
    """Wait for the descendants of this process to end, then kill the remaining ones.

    Args:
        leave_s: Time that descendants have to end by themselves, in seconds.

    Returns:
        The killed processes, and the number of processes that still exist.
    """
    started = time.monotonic()
    killed: set[int] = set()
    reap()
    while alive := descendants(os.getpid()):
        waited_s = time.monotonic() - started
        if waited_s > leave_s + _KILL_S:
            break
        if waited_s > leave_s:  # they may start others meanwhile
            kill(alive)
            killed |= set(alive)
        time.sleep(_POLL_S)
        reap()
    return killed, len(alive)


# Temporary folders


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder, and remove it at the end of the block.

    If this process is killed, the next one on this host that makes such a folder removes it.

    Args:
        prefix: Beginning of its name.
    """
    # Locks of other hosts may not be seen here, so the name has the host.
    prefix = f"{prefix}{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}-"
    _remove_abandoned(prefix)
    folder, lock = _locked_folder(prefix)
    try:
        yield folder
    finally:
        # A process that cannot be killed may still write here; the report has told of it.
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(prefix: str) -> tuple[Path, int]:
    """Make a folder. Return it, and the descriptor that holds its lock."""
    while True:
        folder = tempfile.mkdtemp(prefix=prefix)
        with suppress(FileNotFoundError):  # another command removed it before it was locked
            lock = os.open(folder, _OPEN)
            with suppress(OSError):  # a file system without locks: no command removes it then
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(folder):
                return Path(folder), lock
            os.close(lock)


def _remove_abandoned(prefix: str) -> None:
    # mkdtemp adds eight characters to the prefix.
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(prefix)}{'[a-z0-9_]' * 8}"):
        # Skipped: folders of other users, links and files, and folders whose lock is held.
        with suppress(OSError):
            lock = os.open(folder, _OPEN | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


# Files in /dev/shm


@contextmanager
def no_shared_files(prefixes: Sequence[str]) -> Iterator[None]:
    """Remove the files that MPI has made in /dev/shm during the block and left there.

    MPICH's launcher (5.0) leaves a file whenever ranks are killed. Open MPI's (5.0) leaves files if
    it is killed itself. A file is removed if it appeared during the job, belongs to this user, and
    no process uses it. So the files of other jobs stay: a rank has its file open or mapped from
    the creation on.

    Args:
        prefixes: Beginnings of the names that the MPI library gives.
    """
    before = _shared_files(prefixes)
    try:
        yield
    finally:
        new = {path for path in _shared_files(prefixes) - before if _is_own(path)}
        for path in new - _paths_in_use() if new else ():
            with suppress(FileNotFoundError):
                os.unlink(path)


def _shared_files(prefixes: Sequence[str]) -> set[str]:
    names = os.listdir(SHARED_MEMORY)
    return {f"{SHARED_MEMORY}/{name}" for name in names if name.startswith(tuple(prefixes))}


def _is_own(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _paths_in_use() -> set[str]:
    """Return the files that a process of this host has open or mapped."""
    paths: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # The process may end meanwhile. Processes of other users cannot be read.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # Descriptors before mappings, because MPI maps a file before it closes it.
            for entry in os.listdir(process / "fd"):
                with suppress(FileNotFoundError):
                    paths.add(os.readlink(process / "fd" / entry))
            for line in (process / "maps").read_text(errors="replace").splitlines():
                paths.add(line[line.find("/") :] if "/" in line else "")
    return paths
