"""Numbers that need not be given."""

from __future__ import annotations

import os

AUTOTUNE = -1
"""In place of ``num_parallel_calls``, and of the size of ``prefetch``: a number that serves."""

AHEAD = 2
"""Elements that ``prefetch(AUTOTUNE)`` makes ahead: one to be taken while the next is made."""

CYCLE_LENGTH = 16
"""Datasets that take turns in ``interleave``: of all machines alike, which have the same order."""


def usable_cores() -> int:
    """Local. How many cores this process may use."""
    return len(os.sched_getaffinity(0))
