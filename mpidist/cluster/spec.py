"""Cluster specs: jobs, tasks and addresses, and the roles of training tasks. Pure."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from mpidist.errors import NotFoundError, did_you_mean
from mpidist.proto.mpidist_pb2 import ClusterDef

Task = tuple[str, int]
Tasks = dict[int, str]

# A Server runs the services of these jobs. On a rank with several tasks the script gets the task of
# another job.
SERVICE_JOBS = ("ps", "data")
TRAINING_JOBS = ("chief", "worker", "evaluator", "ps")

_ADDRESS = re.compile(r"([^\s,]+):([0-9]{1,9})")
_LAST_INDEX = 2**31 - 1  # the range of int32 in the protobuf message


class ClusterSpec:
    """The jobs of a cluster, with the address of each task; as ``tf.train.ClusterSpec``.

    Args:
        cluster: A dict of job names to lists of addresses, or to dicts of task index to address; a
            ClusterDef of this package or of TensorFlow; a ClusterSpec; or an object with
            ``as_cluster_def()`` or ``as_dict()``, such as ``tf.train.ClusterSpec``.

    Raises:
        TypeError: The cluster is none of these, a job name or an address is not a string, or an
            index is not a number.
        ValueError: An index is out of range, or a job or an index is given twice.

    Example:
        >>> from mpidist import ClusterSpec
        >>> spec = ClusterSpec({"ps": ["a:2222"], "worker": ["b:2222", "c:2222"]})
        >>> spec.num_tasks("worker")
        2
        >>> spec.task_address("worker", 1)
        'c:2222'
        >>> spec.as_dict()["ps"]
        ['a:2222']
    """

    def __init__(self, cluster: Any) -> None:
        self._jobs: dict[str, Tasks]
        # The original message: it may have fields that this version does not know.
        self._message: ClusterDef | None = None
        if not isinstance(cluster, ClusterSpec | Mapping):
            cluster = _as_message_or_dict(cluster)
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
            self._message = cluster._message  # never modified, so it can be shared
        elif is_message(cluster, "ClusterDef"):
            self._message = ClusterDef.FromString(cluster.SerializeToString())
            self._jobs = _checked_jobs([(job.name, dict(job.tasks)) for job in self._message.job])
            self._message.job.sort(key=lambda job: job.name)
        elif isinstance(cluster, Mapping):
            self._jobs = _checked_jobs(cluster.items())
        else:
            raise TypeError(
                "a ClusterSpec is made from a dict, a ClusterDef or a ClusterSpec, not from "
                f"{type(cluster).__name__}"
            )

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        return self._jobs == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return f"ClusterSpec({ {job: jobs[job] for job in sorted(jobs)}!r})"

    def as_dict(self) -> dict[str, list[str] | Tasks]:
        """Return the addresses of each job: a list, or a dict by index if indices are missing."""
        return {
            job: [tasks[i] for i in range(len(tasks))]
            if tasks and set(tasks) == set(range(len(tasks)))
            else dict(sorted(tasks.items()))
            for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> ClusterDef:
        """Return the protobuf message, with jobs sorted by name and tasks by index."""
        if self._message is None:
            return self._known_def()
        definition = ClusterDef()
        definition.CopyFrom(self._message)
        return definition

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the given order."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job; raise ValueError if the job does not exist."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the sorted task indices of a job; raise ValueError if the job does not exist."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task; raise ValueError if the job or task does not exist."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(f"job {job_name!r} has no task {task_index}: it has {sorted(tasks)}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job by index, with None for missing indices.

        Raises:
            ValueError: The job does not exist.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def tasks(self) -> list[tuple[str, int]]:
        """Return all (job, index) pairs: jobs in the given order, indices sorted."""
        return [(job, index) for job, tasks in self._jobs.items() for index in sorted(tasks)]

    def task_of(self, rank: int) -> tuple[str, int]:
        """Return the task of a rank, in a cluster whose addresses are ``<host>:<rank>``.

        If the rank has several tasks, the task of a service job (ps, data) comes last.

        Raises:
            NotFoundError: No task has this rank.
            ValueError: An address has another form.
        """
        found = [t for t in self.tasks() if split_address(self.task_address(*t))[1] == rank]
        if not found:
            raise NotFoundError(f"no task of {self!r} is on rank {rank}")
        return min(found, key=lambda task: task[0] in SERVICE_JOBS)

    def digest(self) -> bytes:
        """Return a hash of 16 bytes, which is equal for equal specs."""
        data = self._known_def().SerializeToString(deterministic=True)
        return hashlib.blake2b(data, digest_size=16).digest()

    def _known_def(self) -> ClusterDef:
        definition = ClusterDef()
        for name in sorted(self._jobs):
            job = definition.job.add(name=name)
            for number in sorted(self._jobs[name]):
                job.tasks[number] = self._jobs[name][number]
        return definition

    def _job(self, name: str) -> Tasks:
        if name not in self._jobs:
            hint = did_you_mean(name, self.jobs)
            raise ValueError(f"no such job: {name!r}{hint}; the jobs are {self.jobs}")
        return self._jobs[name]


# Roles of training tasks, by the rules of TensorFlow's multi_worker_util


def normalize_cluster_spec(cluster_spec: Any) -> ClusterSpec:
    """Return the ClusterSpec of a dict, a ClusterDef, or a ClusterSpec of any library.

    Raises:
        ValueError: The argument is none of these; or see :class:`ClusterSpec`, as for TypeError.
    """
    if not isinstance(cluster_spec, Mapping | ClusterSpec):
        cluster_spec = _as_message_or_dict(cluster_spec)
    if isinstance(cluster_spec, Mapping | ClusterSpec) or is_message(cluster_spec, "ClusterDef"):
        return ClusterSpec(cluster_spec)
    raise ValueError(
        f"a cluster spec is a dict, a ClusterDef or a ClusterSpec, not {cluster_spec!r}"
    )


def validate_cluster_spec(cluster_spec: Any, task_type: str | None, task_id: int | None) -> None:
    """Check that a cluster has training jobs only, and that it has a task.

    Args:
        cluster_spec: See :func:`normalize_cluster_spec`.
        task_type: Job of the task; None checks no task. An evaluator may be missing in the cluster.
        task_id: Index of the task.

    Raises:
        ValueError: A job is not chief, worker, ps or evaluator; there are several chiefs or
            evaluators; or the task does not exist.
    """
    spec = normalize_cluster_spec(cluster_spec)
    for job in (*spec.jobs, *([] if task_type is None else [task_type])):
        if job not in TRAINING_JOBS:
            raise ValueError(
                f"{job!r} is not a training job; the training jobs are {TRAINING_JOBS}"
            )
    for job in ("chief", "evaluator"):
        if _count(spec, job) > 1:
            raise ValueError(f"there can be one {job}, and the cluster has {_count(spec, job)}")
    if task_type is None or (task_type == "evaluator" and task_type not in spec.jobs):
        return
    if task_id is None or not 0 <= task_id < _count(spec, task_type):
        count = _count(spec, task_type)
        raise ValueError(f"there is no {task_type} {task_id}: the cluster has {count} of them")


def is_chief(cluster_spec: Any, task_type: str | None, task_id: int | None) -> bool:
    """Return whether a task is the chief: the chief, an evaluator, or else worker 0.

    Arguments and errors as for :func:`validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
    without = "chief" not in normalize_cluster_spec(cluster_spec).jobs
    return without and task_type == "worker" and task_id == 0


def worker_count(cluster_spec: Any, task_type: str) -> int:
    """Return the number of tasks that train together: chief and workers, or the evaluators.

    Raises:
        ValueError: The job is ps, or does not exist; or see :func:`validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, 0)
    spec = normalize_cluster_spec(cluster_spec)
    if task_type == "ps":
        raise ValueError("tasks of ps do not train: they have no number of workers")
    if task_type == "evaluator":
        return spec.num_tasks("evaluator")
    return _count(spec, "chief") + _count(spec, "worker")


def id_in_cluster(cluster_spec: Any, task_type: str, task_id: int) -> int:
    """Return the number of a task among the tasks of :func:`worker_count`; the chief is 0.

    Raises:
        ValueError: The job is ps; or see :func:`validate_cluster_spec`.
    """
    validate_cluster_spec(cluster_spec, task_type, task_id)
    if task_type == "ps":
        raise ValueError("tasks of ps do not train: they have no number")
    if task_type == "worker":
        return task_id + _count(normalize_cluster_spec(cluster_spec), "chief")
    return 0 if task_type == "chief" else task_id


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


# Checks of arguments


def as_text(value: Any, name: str) -> str:
    """Return a name or an address as a str.

    Args:
        value: The argument.
        name: Name of the argument, for messages.

    Raises:
        TypeError: The value is neither str nor bytes.
        ValueError: The value cannot be encoded in UTF-8.
    """
    if not isinstance(value, str | bytes):
        raise TypeError(f"the {name} must be a string, not {value!r}")
    try:
        return value.decode() if isinstance(value, bytes) else value.encode().decode()
    except UnicodeError as error:
        raise ValueError(f"the {name} must be text in UTF-8, not {value!r}") from error


def as_integer(value: Any, name: str) -> int:
    """Return a number as a Python int; raise TypeError for other values and for bools."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return index(value)
    raise TypeError(f"the {name} must be a whole number, not {value!r}")


def as_task_index(value: Any, name: str) -> int:
    """Return the index of a task; ``"7"`` and ``7.0`` are 7, as in TensorFlow.

    Args:
        value: The argument.
        name: Name of the argument, for messages.

    Raises:
        TypeError: The value is not a number.
        ValueError: The value is not whole, negative, or more than 32 bits.
    """
    try:
        number = int(value) if isinstance(value, str | bytes | float) else as_integer(value, name)
    except (ValueError, OverflowError):  # other text, NaN, infinity
        number = -1
    if not 0 <= number <= _LAST_INDEX or (isinstance(value, float) and value != number):
        raise ValueError(
            f"the {name} must be a whole number from 0 to {_LAST_INDEX}, not {value!r}"
        )
    return number


def split_address(address: str) -> tuple[str, int]:
    """Return the host, and the port or rank, of an address; raise ValueError for other forms."""
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise ValueError(f"{address!r} is not <host>:<rank>")
    return parts[1], int(parts[2])


def is_message(value: Any, name: str) -> bool:
    """Return whether a value is a protobuf message of a name, generated by any library."""
    if isinstance(value, type) or not hasattr(value, "SerializeToString"):
        return False
    return getattr(getattr(value, "DESCRIPTOR", None), "name", None) == name


def _as_message_or_dict(cluster: Any) -> Any:
    """Return the ClusterDef or dict of another library's cluster spec; other values unchanged."""
    if not isinstance(cluster, type):
        for name in ("as_cluster_def", "as_dict"):
            convert = getattr(cluster, name, None)
            if callable(convert):
                return convert()
    return cluster


def _checked_jobs(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Tasks]:
    jobs: dict[str, Tasks] = {}
    for name, tasks in pairs:
        job = as_text(name, "job name")
        if job in jobs:
            raise ValueError(f"job {job!r} is given twice: give all its tasks in one place")
        jobs[job] = _checked_tasks(job, tasks)
    return jobs


def _checked_tasks(job: str, tasks: Any) -> Tasks:
    if isinstance(tasks, list | tuple):
        pairs: Iterable[tuple[Any, Any]] = enumerate(tasks)
    elif isinstance(tasks, Mapping):
        pairs = tasks.items()
    else:
        raise TypeError(
            f"the tasks of job {job!r} must be a list of addresses or a dict of index to address, "
            f"not {type(tasks).__name__}"
        )
    addresses: Tasks = {}
    for key, address in pairs:
        task = as_task_index(key, f"index of a task of job {job!r}")
        if task in addresses:
            raise ValueError(f"task {task} of job {job!r} is given twice: give it one address")
        addresses[task] = as_text(address, f"address of task {task} of {job!r}")
    return addresses
