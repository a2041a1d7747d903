"""Who is chief and who counts as a worker; rules of ``multi_worker_util``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpidist.cluster.arguments import is_message
from mpidist.cluster.spec import ClusterSpec, described

TRAINING_JOBS = ("chief", "worker", "evaluator", "ps")


def normalize_cluster_spec(cluster_spec: Any) -> ClusterSpec:
    """Return the ClusterSpec of a dict, a ClusterDef, or a ClusterSpec of any library.

    Raises:
        ValueError: It is none of these; or see :class:`ClusterSpec`, as for TypeError.
    """
    if not isinstance(cluster_spec, Mapping | ClusterSpec):
        cluster_spec = described(cluster_spec)
    if isinstance(cluster_spec, Mapping | ClusterSpec) or is_message(cluster_spec, "ClusterDef"):
        return ClusterSpec(cluster_spec)
    raise ValueError(
        f"a cluster spec is a dict, a ClusterDef or a ClusterSpec, not {cluster_spec!r}"
    )


def validate_cluster_spec(cluster_spec: Any, task_type: str | None, task_id: int | None) -> None:
    """Local. Whether a cluster is one of training tasks, and a task one of them.

    Args:
        cluster_spec: See :func:`normalize_cluster_spec`.
        task_type: Job of the task; None for no task. An evaluator need not be in the cluster.
        task_id: Its index.

    Raises:
        ValueError: A job is not chief, worker, ps or evaluator; there are several chiefs or
            evaluators; or there is no such task.
    """
    spec = normalize_cluster_spec(cluster_spec)
    for job in (*spec.jobs, *([] if task_type is None else [task_type])):
        if job not in TRAINING_JOBS:
            raise ValueError(f"{job!r} is no job of training: these are {TRAINING_JOBS}")
    for job in ("chief", "evaluator"):
        if _count(spec, job) > 1:
            raise ValueError(f"there can be one {job}, and the cluster has {_count(spec, job)}")
    if task_type is None or (task_type == "evaluator" and task_type not in spec.jobs):
        return
    if task_id is None or not 0 <= task_id < _count(spec, task_type):
        count = _count(spec, task_type)
        raise ValueError(f"there is no {task_type} {task_id}: the cluster has {count} of them")


def is_chief(cluster_spec: Any, task_type: str | None, task_id: int | None) -> bool:
    """Local. Whether a task leads: the chief, else worker 0; an evaluator, of itself.

    Arguments and errors as of :func:`validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
    without = "chief" not in normalize_cluster_spec(cluster_spec).jobs
    return without and task_type == "worker" and task_id == 0


def worker_count(cluster_spec: Any, task_type: str) -> int:
    """Local. How many tasks train together with one of a job: chief and workers, or evaluators.

    Raises:
        ValueError: The job is ps, or there is no such job; or see :func:`validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, 0)
    spec = normalize_cluster_spec(cluster_spec)
    if task_type == "ps":
        raise ValueError("tasks of ps do not train: there is no number of workers for them")
    if task_type == "evaluator":
        return spec.num_tasks("evaluator")
    return _count(spec, "chief") + _count(spec, "worker")


def id_in_cluster(cluster_spec: Any, task_type: str, task_id: int) -> int:
    """Local. Number of a task among those that :func:`worker_count` counts; the chief is 0.

    Raises:
        ValueError: The job is ps; or see :func:`validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type == "ps":
        raise ValueError("tasks of ps do not train: there is no number for them")
    if task_type == "worker":
        return task_id + _count(normalize_cluster_spec(cluster_spec), "chief")
    return 0 if task_type == "chief" else task_id


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0
