"""Temporary folders of jobs, and files in /dev/shm that MPI leaves when ranks are killed."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def locked_folder(parent: Path, prefix: str) -> tuple[str, int]:
    """Make a folder that :func:`remove_abandoned` leaves alone while its lock is held.

    Args:
        parent: Folder to make it in.
        prefix: Beginning of its name.

    Returns:
        The path, and the descriptor that holds the lock.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        with suppress(FileNotFoundError):  # another command removed it before it was locked
            lock = os.open(folder, _OPEN)
            with suppress(OSError):  # a file system without locks: no command removes it then
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(folder):
                return folder, lock
            os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders that killed commands of this user have left.

    Args:
        parent: Folder that has them.
        prefix: Beginning of their names.
    """
    for folder in parent.glob(f"{glob.escape(prefix)}{'[a-z0-9_]' * 8}"):  # as mkdtemp names them
        # Skipped: folders of other users, links and files, and folders whose lock is held.
        with suppress(OSError):
            lock = os.open(folder, _OPEN | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def shared_files(prefixes: Sequence[str]) -> set[str]:
    """Return the names in /dev/shm that begin with one of the prefixes."""
    return {name for name in os.listdir(_SHARED_MEMORY) if name.startswith(tuple(prefixes))}


def remove_shared_files(prefixes: Sequence[str], before: set[str]) -> list[str]:
    """Remove the files that MPI has left in /dev/shm, and return their names.

    MPICH's launcher (5.0) leaves a file whenever ranks are killed. Open MPI's (5.0) leaves files if
    it is killed itself. A file is removed if it appeared during the job, belongs to this user, and
    no process uses it. So the files of other jobs stay: a rank has its file open or mapped from
    the creation on.

    Args:
        prefixes: Beginnings of the names that the MPI library gives.
        before: The value of :func:`shared_files` before the job.
    """
    new = {name for name in shared_files(prefixes) - before if _is_own(name)}
    removed = []
    for name in sorted(new - _names_in_use()) if new else ():
        with suppress(FileNotFoundError):
            (_SHARED_MEMORY / name).unlink()
            removed.append(name)
    return removed


def _is_own(name: str) -> bool:
    try:
        return (_SHARED_MEMORY / name).stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _names_in_use() -> set[str]:
    """Return the names in /dev/shm that a process of this host has open or mapped."""
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
    start = f"{_SHARED_MEMORY}/"
    return {path.removeprefix(start) for path in paths if path.startswith(start)}
