"""The file system for the shared memory of a node."""

from __future__ import annotations

import os

SHARED_MEMORY = "/dev/shm"
REMEDY = (
    f"make {SHARED_MEMORY} larger (docker run --shm-size 1g, or "
    f"mount -o remount,size=1g {SHARED_MEMORY})"
)


def shared_memory_space(path: str = SHARED_MEMORY) -> tuple[int, int]:
    """Return the free bytes and the total bytes of the file system for shared memory."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
