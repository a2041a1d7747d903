"""The fork guard: errors for the use of MPI and connections in forked children and after MPI.

MPI and connections work only in the process that made them (MPI-4.1, 11.10.1). MPI ends a process
that calls it after MPI_Finalize.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from mpidist.errors import FailedPreconditionError

_parent = 0
_ended = False

unusable = False
"""True if :func:`check_mpi` fails. Fast paths read it, because a call costs more."""


def in_parent_only(forget: Callable[[], None] = lambda: None) -> None:
    """Make :func:`check` fail in children that are forked from this process from now on.

    Args:
        forget: Called in each child first, to release the state of the parent.
    """

    def in_child() -> None:
        global _parent, unusable
        _parent, unusable = _parent or parent, True
        forget()

    parent = os.getpid()
    os.register_at_fork(after_in_child=in_child)


def check() -> None:
    """Raise FailedPreconditionError in a forked child."""
    if _parent:
        raise FailedPreconditionError(
            f"process {os.getpid()} was forked from process {_parent}, whose connections it must "
            "not use: start children with the 'spawn' or 'forkserver' method, or use mpidist only "
            "in the parent"
        )


def end_mpi() -> None:
    """Make :func:`check_mpi` fail in this process from now on."""
    global _ended, unusable
    _ended = unusable = True


def mpi_has_ended() -> bool:
    """Return whether this rank has left the job."""
    return _ended


def check_mpi() -> None:
    """Raise FailedPreconditionError in a forked child, and after this rank has left the job."""
    if _parent:
        check()
    if _ended:
        raise FailedPreconditionError(
            "MPI has ended in this process, as it does at the end of the script; code that runs "
            "later, such as a function given to atexit before MPI was started, cannot use mpidist"
        )
