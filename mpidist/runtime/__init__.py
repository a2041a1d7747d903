"""Where this process stands in the MPI world; the only place that starts MPI and ends the job."""

from mpidist.runtime import fork
from mpidist.runtime.backoff import Backoff
from mpidist.runtime.exits import exits, this_rank
from mpidist.runtime.metrics import TaskMetrics, task_metrics
from mpidist.runtime.together import together
from mpidist.runtime.waits import Waits
from mpidist.runtime.world import World, launched, world

__all__ = [
    "Backoff",
    "TaskMetrics",
    "Waits",
    "World",
    "exits",
    "fork",
    "launched",
    "task_metrics",
    "this_rank",
    "together",
    "world",
]
