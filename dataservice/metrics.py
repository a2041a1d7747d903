"""The numbers of this process, for ``mpidist top``."""

from __future__ import annotations

from mpidist import Server, TaskMetrics, task_metrics


def own_metrics() -> TaskMetrics:
    """Return the numbers of the task with a Server in this process, or of the process."""
    server = Server.current()
    task = ("dataset", 0) if server is None else (server.job_name, server.task_index)
    return task_metrics(*task)
