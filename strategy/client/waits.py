"""Long waits of a worker for ps tasks and for other workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mpidist import Work
from mpidist.mpi import waiting_for

LOOK_S = 1.0
"""Seconds between two checks whether the other processes of a wait are alive."""

# The wait for a call registers itself after 0.5 s without a break, and names the ps task alone. The
# caller knows more: the variable, the step and the other workers that it needs.
_SLICE_S = 0.4


def block(works: Sequence[Work], describe: Callable[[], tuple[str, Sequence[str]]]) -> None:
    """Wait until works have ended. Their errors are not raised.

    Args:
        works: The works.
        describe: Returns the wait and its tasks for :func:`mpidist.mpi.waiting_for`. Called only if
            the wait lasts.
    """
    deadline = time.monotonic() + _SLICE_S
    for work in works:
        work.block(deadline)
    if all(work.is_completed() for work in works):
        return
    what, tasks = describe()
    with waiting_for(what, tasks, time.time() - _SLICE_S):
        for work in works:
            while not work.is_completed():
                work.block(time.monotonic() + _SLICE_S)
