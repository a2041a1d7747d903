"""What ended a rank before MPI was started: ``mpidist run`` would know its status alone."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from types import TracebackType

from mpidist.runtime import records


def tell_failures() -> None:
    """Local. Have an uncaught exception leave a record, until MPI is started and does more.

    Only in a rank itself, which the keeper has started: what a rank starts, or forks, may fail
    without ending it.
    """
    rank, _, keeper = os.environ.get("MPIDIST_RUN_KEEPER", "").partition(":")
    if not keeper or int(keeper) != os.getppid():
        return
    before, own = sys.excepthook, os.getpid()

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        if os.getpid() == own and issubclass(kind, Exception):
            reason = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
            identity = records.Identity(int(rank), own, socket.gethostname())
            records.write_failure(identity, reason, "", 1)

    sys.excepthook = uncaught
