"""How much memory there is for this process: of its host, and of what it is allowed.

Linux grants memory that it does not have, and ends a process when it is used. Whoever is about to
take much asks here first, and can say what does not fit.
"""

from __future__ import annotations

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
    with open(_PROC / "meminfo") as file:
        facts = dict(line.split(":") for line in file)
    return int(facts["MemAvailable"].split()[0]) << 10


def _free_of_groups() -> Iterator[tuple[int, str]]:
    """What is left of the limits of control groups, by which containers and batch jobs are held."""
    for group, (limit_name, use_name, prefix) in _control_groups():
        try:
            limit = (group / limit_name).read_text().strip()
            if limit == "max":
                continue
            used = int((group / use_name).read_text())
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:  # the root has no limit; of others' groups a container sees nothing
            continue
        files = sum(int(facts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        yield max(int(limit) - used + files, 0), "container or batch job"


def _control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The groups of this process that limit memory, with those that they are in."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:  # a system without control groups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _GROUPS, _FILES[2]
        elif "memory" in controllers.split(","):
            root, names = _GROUPS / "memory", _FILES[1]
        else:
            continue
        own = PurePosixPath(path).relative_to("/")
        for part in (own, *own.parents):
            yield root / part, names
