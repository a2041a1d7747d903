"""What a job may leave behind on its host: processes, and files in shared memory."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from mpidist.launcher.vendors import VENDORS

_SHARED = tuple(prefix for vendor in VENDORS for prefix in vendor.shared_files)


def shared_files():
    """The names in /dev/shm that a job may have made."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(_SHARED)}


def abandoned(before, timeout_s=5.0):
    """Names that appeared, stay, and that nobody uses, as other jobs here may."""
    return _until_none(lambda: _unused(shared_files() - before), timeout_s)


def remaining(word, timeout_s=0.0):
    """The processes with a word in their command line or environment, once there are none, or late.

    Args:
        word: For example the name of the job's folder.
        timeout_s: How long to wait until there are none.

    Returns:
        Their command lines.
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
    """Whether it is the folder of a command that is alive."""
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
