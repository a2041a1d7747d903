"""Files in /dev/shm that an MPI library makes for a job, and leaves there when ranks are killed."""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from mpidist.launcher import processes

_FOLDER = Path("/dev/shm")
_OWN = "mpidist-shm-"
_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class SharedFiles:
    """A folder in /dev/shm for the files of this job, and a watch over those made beside it.

    Not every library makes all its files where it is told to. Which new files beside the folder
    belong to the descendants of this process is told by their names and by who has them open or
    mapped, so they are looked at while their makers live: at once when they appear. A maker that
    was killed before that has left a file that nobody uses when the job has ended. Files of
    other jobs, and those that a script makes for itself, are left alone.

    Args:
        prefixes: How the names start that the MPI library gives.

    Attributes:
        folder: The folder.
        handle: A descriptor that is readable when files have appeared; then call :meth:`look`. None
            where the system has none to give: then call it often.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = tuple(prefixes)
        self._ours: set[str] = set()
        self.handle = _watch_of(_FOLDER)
        self._before = self._present()
        self._known = set(self._before)
        remove_abandoned(_FOLDER, _OWN)
        self.folder, self._lock = locked_folder(_FOLDER, _OWN)

    def _present(self) -> set[str]:
        """Local. The files there now that have such names."""
        return {name for name in os.listdir(_FOLDER) if name.startswith(self._prefixes)}

    def look(self) -> None:
        """Local. See which of the files that have appeared are ours."""
        with suppress(BlockingIOError):
            while self.handle is not None and os.read(self.handle, 1 << 16):
                pass  # the names are read from the folder itself, all at once
        new = self._present() - self._known
        if new:
            self._known |= new
            self._ours |= new & _in_use(process.pid for process in processes.descendants())

    def close(self) -> list[str]:
        """Local. Remove our files, once the job has ended.

        Returns:
            The names of those beside the folder that were still there.
        """
        self.look()
        if self.handle is not None:
            os.close(self.handle)
        strangers = {name for name in self._known - self._before - self._ours if _is_own(name)}
        if strangers:
            everybody = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
            self._ours |= strangers - _in_use(everybody)
        # What a process that cannot be killed still writes there is told of by its number.
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        removed = []
        for name in sorted(self._ours):
            with suppress(FileNotFoundError):
                (_FOLDER / name).unlink()
                removed.append(name)
        return removed


def _watch_of(folder: Path) -> int | None:
    """Local. A descriptor that is readable when files have appeared in a folder, if there is one.

    A user has some hundred of them, which other programs may have taken.
    """
    libc = ctypes.CDLL(None)
    handle: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if handle < 0:
        return None
    if libc.inotify_add_watch(handle, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO) < 0:
        os.close(handle)
        return None
    return handle


def locked_folder(parent: Path, prefix: str) -> tuple[str, int]:
    """Local. A new folder, and the descriptor that keeps others from removing it.

    Args:
        parent: Where it is made.
        prefix: How its name begins.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        with suppress(FileNotFoundError):  # another command saw it before it was locked
            lock = os.open(folder, _OPEN)
            with suppress(OSError):  # a file system without locks: nobody removes it then
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(folder):
                return folder, lock
            os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Local. Remove the folders of this user's commands that were killed.

    Args:
        parent: Where they are.
        prefix: How their names begin.
    """
    for folder in parent.glob(f"{glob.escape(prefix)}{'[a-z0-9_]' * 8}"):  # as they are made
        # Another user's, or no folder, or removed meanwhile; or its command is alive.
        with suppress(OSError):
            lock = os.open(folder, _OPEN | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _is_own(name: str) -> bool:
    """Local. Whether a name in /dev/shm is there, and this user's."""
    try:
        return (_FOLDER / name).stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _in_use(pids: Iterable[int]) -> set[str]:
    """Local. The names in /dev/shm that some processes have open or mapped."""
    found: set[str] = set()
    for pid in pids:
        # Ended meanwhile, or changed its user: nothing to learn.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            folder = Path(f"/proc/{pid}")
            # Descriptors before mappings: a maker maps the file before it closes it.
            for entry in os.listdir(folder / "fd"):
                with suppress(FileNotFoundError):
                    found.add(os.readlink(folder / "fd" / entry))
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                found.add(line[line.find("/") :] if "/" in line else "")
    start = f"{_FOLDER}/"
    return {path.removeprefix(start) for path in found if path.startswith(start)}
