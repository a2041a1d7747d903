"""Search for processes and shared-memory files that a job has left on its host."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from mpidist.launcher.vendors import VENDORS

_SHARED = tuple(prefix for vendor in VENDORS for prefix in vendor.shared_files)


def shared_files():
    """Return the names in /dev/shm that a job may have created."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(_SHARED)}


def abandoned(before, timeout_s=5.0):
    """Wait until no new unused file is left in /dev/shm. Return the remaining names.

    Files in use may belong to other jobs on this host.
    """
    return _until_none(lambda: _unused(shared_files() - before), timeout_s)


def remaining(word, timeout_s=0.0):
    """Wait until no process has a word in its command line or environment.

    Args:
        word: For example the name of the job's folder.
        timeout_s: Limit of the wait in seconds.

    Returns:
        The command lines of the remaining processes.
    """
    return _until_none(lambda: _processes(word), timeout_s)


def _until_none(look, timeout_s):
    deadline = time.monotonic() + timeout_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _processes(word):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (folder / "environ").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if (word in line or word in environment) and int(folder.name) != os.getpid():
            found.append(line)
    return found


def _unused(names):
    names = {name for name in names if not _is_locked(Path("/dev/shm") / name)}
    for path in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = path.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        names = {name for name in names if name not in text}
    return names


def _is_locked(path):
    """Return whether a path is the locked folder of a running command."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
