"""Saying that somebody has waited for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dataservice.config import stall_s

logger = logging.getLogger(__name__)


class Stall:
    """One wait, which begins now; a warning says so, once, when it has lasted for ``stall_s()``.

    Args:
        who: Who waits.
        what: Gives in words what is waited for, and what may be wrong.
    """

    def __init__(self, who: str, what: Callable[[], str]) -> None:
        self._who = who
        self._what = what
        self._since = time.monotonic()
        self._limit_s = stall_s()

    @property
    def due_s(self) -> float:
        """Local. Seconds until the warning; infinite when it has been given."""
        return max(self._since + self._limit_s - time.monotonic(), 0.0)

    def look(self) -> None:
        """Local. Give the warning if it is time; for those who wait, in every round."""
        if self.due_s > 0:
            return
        self._limit_s = float("inf")
        waited_s = time.monotonic() - self._since
        logger.warning("%s has waited %.3g s for %s", self._who, waited_s, self._what())


def missing_dispatcher(address: str, protocol: str, patience_s: float) -> str:
    """Local. What those who look for a dispatcher wait for.

    Args:
        address: Where it should be.
        protocol: How it is asked.
        patience_s: For how long they look, in seconds.
    """
    return (
        f"the dispatcher at {address}, which does not answer: {_CAUSES.get(protocol, _STARTED)} "
        f"This fails after {patience_s:g} s"
    )


_STARTED = "has it been started, and is that its address?"
_CAUSES = {
    "inproc": "it is looked for in this process alone (inproc); the address of one in another "
    "process begins with tcp:// or mpi://.",
    "tcp": f"{_STARTED} A DispatchServer in a plain Python process needs a port, or "
    "protocol='tcp', to be reached from others. Do both know the same secret (MPIDIST_SECRET)?",
}
