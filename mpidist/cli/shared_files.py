"""Files in /dev/shm that an MPI library makes for a job, and leaves there when ranks are killed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mpidist.cli import processes

_FOLDER = Path("/dev/shm")
_IN_CREATE = 0x100
_IN_MOVED_TO = 0x80


class SharedFiles:
    """Remembers which new files in /dev/shm belong to the descendants of this process.

    A file is told by its name and by who has it open or mapped, so it must be looked at while its
    maker lives: at once when it appears. Files of other jobs, and those that a script makes for
    itself, are left alone.

    Args:
        prefixes: How the names start that the MPI library gives.

    Attributes:
        handle: A descriptor that is readable when files have appeared; then call :meth:`look`.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = tuple(prefixes)
        self._ours: set[str] = set()
        libc = ctypes.CDLL(None, use_errno=True)
        self.handle: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        path = os.fsencode(_FOLDER)
        if (
            self.handle < 0
            or libc.inotify_add_watch(self.handle, path, _IN_CREATE | _IN_MOVED_TO) < 0
        ):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot watch it: {os.strerror(number)}", str(_FOLDER))
        self._known = self._present()

    def _present(self) -> set[str]:
        """Local. The files there now that have such names."""
        return {name for name in os.listdir(_FOLDER) if name.startswith(self._prefixes)}

    def look(self) -> None:
        """Local. See which of the files that have appeared are ours."""
        with suppress(BlockingIOError):
            while os.read(self.handle, 1 << 16):
                pass  # the names are read from the folder itself, all at once
        new = self._present() - self._known
        if new:
            self._known |= new
            self._ours |= new & _in_use()

    def close(self) -> list[str]:
        """Local. Remove our files, once the job has ended.

        Returns:
            The names of those that were still there.
        """
        os.close(self.handle)
        removed = []
        for name in sorted(self._ours):
            with suppress(FileNotFoundError):
                (_FOLDER / name).unlink()
                removed.append(name)
        return removed


def _in_use() -> set[str]:
    """Local. The names in /dev/shm that descendants of this process have open or mapped."""
    found: set[str] = set()
    for process in processes.descendants():
        # Ended meanwhile, or changed its user: nothing to learn.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            folder = Path(f"/proc/{process.pid}")
            # Descriptors before mappings: a maker maps the file before it closes it.
            for entry in os.listdir(folder / "fd"):
                with suppress(FileNotFoundError):
                    found.add(os.readlink(folder / "fd" / entry))
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                found.add(line[line.find("/") :] if "/" in line else "")
    start = f"{_FOLDER}/"
    return {path.removeprefix(start) for path in found if path.startswith(start)}
