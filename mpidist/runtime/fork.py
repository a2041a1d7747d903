"""Where MPI and connections must not be used: in a forked child, and after the end of MPI.

They work only in the process that made them (MPI 4.1, 11.10.1), and MPI ends a process that calls
it after MPI_Finalize.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from mpidist.errors import FailedPreconditionError

_parent = 0
_ended = False

unusable = False
"""Whether :func:`check_mpi` fails, for those who have no time to call it."""


def in_parent_only(forget: Callable[[], None] = lambda: None) -> None:
    """Local. From now on :func:`check` fails in children that are forked from this process.

    Args:
        forget: Called in each child first, to undo what must not happen there.
    """

    def in_child() -> None:
        global _parent, unusable
        _parent, unusable = _parent or parent, True
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


def end_mpi() -> None:
    """Local. From now on :func:`check_mpi` fails in this process."""
    global _ended, unusable
    _ended = unusable = True


def mpi_has_ended() -> bool:
    """Return whether this rank has left the job."""
    return _ended


def check_mpi() -> None:
    """Local. FailedPreconditionError in a forked child, and once this rank has left the job."""
    if _parent:
        check()
    if _ended:
        raise FailedPreconditionError(
            "MPI has ended in this process, as it does at the end of the script: what uses mpidist "
            "later, for example a function given to atexit before MPI was started, comes too late"
        )
