"""The numbers of this process, for ``mpidist top``."""

from __future__ import annotations

from mpidist import TaskMetrics, started_server, task_metrics


def own_metrics() -> TaskMetrics:
    """Local. Those of the task whose Server has been started here, or of the process."""
    server = started_server()
    task = ("dataset", 0) if server is None else (server.job_name, server.task_index)
    return task_metrics(*task)
