"""The MPI world of this process; the only package that starts MPI, ends the job and sets hooks."""

from mpidist.runtime import fork
from mpidist.runtime.backoff import Backoff
from mpidist.runtime.metrics import TaskMetrics, task_metrics
from mpidist.runtime.pending import PendingOps, pending_ops, watched
from mpidist.runtime.world import World, launched, started_world, this_rank, world

__all__ = [
    "Backoff",
    "PendingOps",
    "TaskMetrics",
    "World",
    "fork",
    "launched",
    "pending_ops",
    "started_world",
    "task_metrics",
    "this_rank",
    "watched",
    "world",
]
