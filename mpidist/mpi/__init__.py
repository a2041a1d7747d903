"""The MPI world of this process; the only package that starts MPI, ends the job and sets hooks."""

from mpidist.mpi import fork
from mpidist.mpi.backoff import Backoff, SharedCoreBackoff
from mpidist.mpi.metrics import TaskMetrics, task_metrics
from mpidist.mpi.pending import DETAIL_HINT, PendingOps, pending_ops, waiting_for, watched
from mpidist.mpi.world import World, launched, started_world, this_rank, world
from mpidist.runner import current_frames

__all__ = [
    "DETAIL_HINT",
    "Backoff",
    "PendingOps",
    "SharedCoreBackoff",
    "TaskMetrics",
    "World",
    "current_frames",
    "fork",
    "launched",
    "pending_ops",
    "started_world",
    "task_metrics",
    "this_rank",
    "waiting_for",
    "watched",
    "world",
]
