"""The memory of this process: how much is left, and what the C library does with freed memory.

Linux grants memory that it does not have, and kills a process that uses it. A large allocation
checks here first, and can report the shortage.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mpidist.errors import ResourceExhaustedError

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
# By version of control groups: file names of limit and use, and the prefix of the file pages in
# memory.stat, which the kernel reclaims when memory is short.
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}
_FILES[2] = ("memory.max", "memory.current", "")
# Options of glibc's mallopt (malloc.h). Some releases of glibc limit the second one to 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 256 << 20
_LARGEST_BYTES = 128 << 20
_OLD_LIMIT_BYTES = 32 << 20
_libc = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed arrays of up to 128 MiB, for the whole process.

    The C library gives memory back if more than 256 MiB are free at the end of the heap. Without
    this function, it gives large arrays back at once, and the system has to clear the pages of the
    next ones. MPI allocates an array for each large reduction: an all_reduce of 64 MiB then takes
    about twice as long, and a reduce 1.6 to 2.6 times. ZeroMQ allocates memory for each message
    that arrives: messages of 1 to 2 MiB by sockets then take 1.3 to 1.8 times as long. C libraries
    other than glibc stay as they are.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT_BYTES)


def check_free(nbytes: int, remedy: str) -> None:
    """Raise an error if fewer than ``nbytes`` bytes of memory are free.

    Args:
        nbytes: The memory that is needed, in bytes.
        remedy: The remedy, for the message.

    Raises:
        ResourceExhaustedError: The host, container or batch job has less free memory.
    """
    left, owner = free_memory()
    if nbytes > left and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)  # gives the memory of freed arrays back
        left, owner = free_memory()
    if nbytes > left:
        raise ResourceExhaustedError(f"the {owner} has {left >> 20} MiB of memory left: {remedy}")


def free_memory() -> tuple[int, str]:
    """Return the free memory in bytes, and ``"host"`` or the name of the lowest limit."""
    return min([(_free_of_host(), "host"), *_free_of_groups()])


def _free_of_host() -> int:
    """Return the memory that is free without swapping."""
    try:
        facts = dict(line.split(":") for line in (_PROC / "meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):  # an old kernel, or one without this file
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_of_groups() -> Iterator[tuple[int, str]]:
    """Yield the rest of each limit of control groups, which hold containers and batch jobs."""
    for group, (limit_name, use_name, prefix) in _control_groups():
        try:
            limit = int((group / limit_name).read_text())
            used = int((group / use_name).read_text())
        except (OSError, ValueError):  # no limit, or not visible in a container
            continue
        yield max(limit - used + _file_pages(group, prefix), 0), "container or batch job"


def _file_pages(group: Path, prefix: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        facts = dict(line.split() for line in lines)
        return sum(int(facts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        return 0


def _control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the control groups of this process that limit memory, and their parents."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except (OSError, ValueError):  # a system without control groups
        return
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        own = PurePosixPath(path.lstrip("/"))
        if not controllers:
            roots, names = [_GROUPS, _GROUPS / "unified"], _FILES[2]
        elif "memory" in controllers.split(","):
            roots, names = [_GROUPS / "memory"], _FILES[1]
        else:
            continue
        for root, part in itertools.product(roots, (own, *own.parents)):
            yield root / part, names
