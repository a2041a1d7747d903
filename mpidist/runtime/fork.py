"""What holds after a fork: the child has nothing to do with the job.

MPI, and the connections of a process, work only in the process that made them (MPI 4.1, 11.10.1).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from mpidist.errors import FailedPreconditionError

_parent = 0


def in_parent_only(forget: Callable[[], None] = lambda: None) -> None:
    """Local. From now on :func:`check` fails in children that are forked from this process.

    Args:
        forget: Called in each child first, to undo what must not happen there.
    """

    def in_child() -> None:
        global _parent
        _parent = _parent or parent
        forget()

    parent = os.getpid()
    os.register_at_fork(after_in_child=in_child)


def check() -> None:
    """Local. FailedPreconditionError in a forked child."""
    if _parent:
        raise FailedPreconditionError(
            f"process {os.getpid()} was forked from process {_parent}, whose connections it must "
            "not use: start children with the 'spawn' or 'forkserver' method, or use mpidist only "
            "in the parent"
        )
