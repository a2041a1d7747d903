"""The metrics of this process, and reports of long waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dataservice.config import stall_s
from mpidist import Server, TaskMetrics, task_metrics

logger = logging.getLogger(__name__)


class SlowWait:
    """A wait. After ``stall_s()`` seconds it is reported, once, by a warning.

    Args:
        waiter: Name of the waiting thread's owner.
        cause: Describes the awaited event, and faults that may delay it.
        since: Monotonic time of the beginning; None if the wait begins now.
    """

    def __init__(self, waiter: str, cause: Callable[[], str], since: float | None = None) -> None:
        self._waiter = waiter
        self._cause = cause
        self._since = time.monotonic() if since is None else since
        self._limit_s = stall_s()

    @property
    def due_s(self) -> float:
        """Seconds until the warning; infinite after it."""
        return max(self._since + self._limit_s - time.monotonic(), 0.0)

    def check(self) -> None:
        """Log the warning if it is due. Call this in every round of the wait."""
        if self.due_s > 0:
            return
        self._limit_s = float("inf")
        waited_s = time.monotonic() - self._since
        logger.warning("%s has waited %.3g s for %s", self._waiter, waited_s, self._cause())


def missing_dispatcher(address: str, protocol: str, patience_s: float) -> str:
    """Describe the wait for a dispatcher that does not answer.

    Args:
        address: Address of the dispatcher.
        protocol: Protocol of the calls to the dispatcher.
        patience_s: Time limit of the wait, in seconds.
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


def own_metrics() -> TaskMetrics:
    """Return the metrics for ``mpidist top``: of the task in this process, or of the process."""
    server = Server.current()
    task = ("dataset", 0) if server is None else (server.job_name, server.task_index)
    return task_metrics(*task)
