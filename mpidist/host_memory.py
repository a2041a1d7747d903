"""How much memory there is for this process: of its host, and of what it is allowed.

Linux grants memory that it does not have, and ends a process when it is used. Whoever is about to
take much asks here first, and can say what does not fit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mpidist.errors import ResourceExhaustedError

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
# By the version of control groups: names of the limit, the use, and the part of a name in
# memory.stat before that of the lists of file pages, which are given back when memory is short.
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}
_FILES[2] = ("memory.max", "memory.current", "")


def check_free(nbytes: int, remedy: str) -> None:
    """Local. See that so many bytes can be had now.

    Args:
        nbytes: How many.
        remedy: What to do otherwise.

    Raises:
        ResourceExhaustedError: The host, or the container or batch job, has no more so many.
    """
    left, whose = free_memory()
    if nbytes > left:
        raise ResourceExhaustedError(f"its {whose} has {left >> 20} MiB of memory left: {remedy}")


def free_memory() -> tuple[int, str]:
    """Local. How many bytes can be had now, and who has no more: ``"host"``, or what limits us."""
    return min([(_free_of_host(), "host"), *_free_of_groups()])


def _free_of_host() -> int:
    """What can be had without writing to a disk that is there for want of memory."""
    try:
        facts = dict(line.split(":") for line in (_PROC / "meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):  # an old kernel, or one that tells less
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_of_groups() -> Iterator[tuple[int, str]]:
    """What is left of the limits of control groups, by which containers and batch jobs are held."""
    for group, (limit_name, use_name, prefix) in _control_groups():
        try:
            limit = int((group / limit_name).read_text())
            used = int((group / use_name).read_text())
        except (OSError, ValueError):  # it has none, or is not to be seen in a container
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
    """The groups of this process that limit memory, with those that they are in."""
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
