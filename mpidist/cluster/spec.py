"""Which jobs a cluster has, and where their tasks are. Pure: needs no MPI."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpidist.cluster.arguments import index_of_task, is_message, text, whole_number
from mpidist.errors import NotFoundError
from mpidist.proto.mpidist_pb2 import ClusterDef

Task = tuple[str, int]
Tasks = dict[int, str]

# Jobs that a Server runs by itself; a script on a rank that has another task too sees the other.
SERVICE_JOBS = ("ps", "data")


class ClusterSpec:
    """Jobs, their tasks, and the tasks' addresses; as ``tf.train.ClusterSpec``.

    Args:
        cluster: A dict of job names to lists of addresses, or to dicts of task index to address;
            a ClusterDef, ours or another library's; a ClusterSpec; or another library's, an object
            with ``as_cluster_def()`` or ``as_dict()``, such as ``tf.train.ClusterSpec``.

    Raises:
        TypeError: It is none of these, a job's name or an address is not a string, or an index is
            no number.
        ValueError: There is no such index, or a job or an index is there twice.
    """

    def __init__(self, cluster: Any) -> None:
        self._jobs: dict[str, Tasks]
        # The message that it was made from: it may have fields that are not known here.
        self._message: ClusterDef | None = None
        if not isinstance(cluster, ClusterSpec | Mapping):
            cluster = described(cluster)
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
            self._message = cluster._message  # which nobody changes
        elif is_message(cluster, "ClusterDef"):
            self._message = ClusterDef.FromString(cluster.SerializeToString())
            self._jobs = _jobs([(job.name, dict(job.tasks)) for job in self._message.job])
            self._message.job.sort(key=lambda job: job.name)
        elif isinstance(cluster, Mapping):
            self._jobs = _jobs(cluster.items())
        else:
            raise TypeError(
                "a ClusterSpec is made from a dict, a ClusterDef or a ClusterSpec, not from "
                f"{type(cluster).__name__}"
            )

    @classmethod
    def from_counts(
        cls, counts: Mapping[str, int], hosts: Sequence[str], first_rank: int = 0
    ) -> ClusterSpec:
        """Local. Give consecutive ranks to jobs, in the order of the jobs.

        Args:
            counts: Tasks of each job; -1, for one job at most, takes the ranks that remain.
            hosts: Host name of each rank, from ``first_rank`` on.
            first_rank: Rank of the first host.

        Returns:
            A spec whose addresses are ``<host>:<rank>``.

        Raises:
            TypeError: The counts are no dict, or one is no whole number.
            ValueError: The counts do not fit the number of ranks; the message says how.
        """
        if not isinstance(counts, Mapping):
            raise TypeError(f"counts is a dict of jobs to numbers of tasks, not {counts!r}")
        asked = {
            job: whole_number(count, f"number of tasks of job {job!r}")
            for job, count in counts.items()
        }
        open_jobs = [job for job, count in asked.items() if count == -1]
        if len(open_jobs) > 1 or any(count < -1 for count in asked.values()):
            raise ValueError(f"job counts must be 0 or more, with -1 for one job at most: {asked}")
        named = sum(count for count in asked.values() if count > 0)
        if open_jobs:
            asked[open_jobs[0]] = len(hosts) - named
        if named > len(hosts) or (open_jobs and asked[open_jobs[0]] < 1):
            raise ValueError(
                f"the jobs {dict(counts)} need at least {named + len(open_jobs)} ranks, and there "
                f"are {len(hosts)}: start more, or ask for fewer tasks"
            )
        if sum(asked.values()) != len(hosts):
            raise ValueError(
                f"the jobs {dict(counts)} use {sum(asked.values())} of {len(hosts)} ranks; give "
                "one job -1 to take the rest"
            )
        ranks = iter(range(len(hosts)))
        return cls(
            {
                job: [f"{hosts[r]}:{first_rank + r}" for r in (next(ranks) for _ in range(count))]
                for job, count in asked.items()
            }
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
        """Local. Jobs to lists of addresses, or to dicts where the indices have holes."""
        return {
            job: [tasks[i] for i in range(len(tasks))]
            if tasks and set(tasks) == set(range(len(tasks)))
            else dict(sorted(tasks.items()))
            for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> ClusterDef:
        """Local. The protobuf message: jobs by name, tasks by index."""
        if self._message is None:
            return self._known_def()
        definition = ClusterDef()
        definition.CopyFrom(self._message)
        return definition

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the order given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Local. How many tasks a job has; ValueError if there is no such job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Local. Indices of a job's tasks, sorted; ValueError if there is no such job."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Local. Address of a task; ValueError if there is no such job or task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(f"job {job_name!r} has no task {task_index}: it has {sorted(tasks)}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Local. Addresses by index, None in holes; ValueError if there is no such job."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def tasks(self) -> list[tuple[str, int]]:
        """Local. All (job, index) pairs: jobs in order, indices sorted."""
        return [(job, index) for job, tasks in self._jobs.items() for index in sorted(tasks)]

    def rank_of(self, job_name: str, task_index: int) -> int:
        """Local. Rank of a task whose address is ``<host>:<rank>``, as our resolvers make them.

        Raises:
            ValueError: There is no such task, its address has another form, or another task of
                the same job has the same rank.
        """
        rank = _port(self.task_address(job_name, task_index))
        twins = [i for i, a in self._job(job_name).items() if _port(a) == rank]
        if len(twins) > 1:
            raise ValueError(f"tasks {sorted(twins)} of job {job_name!r} have the same rank {rank}")
        return rank

    def task_of(self, rank: int) -> tuple[str, int]:
        """Local. The task of a rank; of several, the one that the script sees, not a service.

        Raises:
            NotFoundError: No task has this rank.
        """
        found = [(job, i) for job, i in self.tasks() if _port(self._jobs[job][i]) == rank]
        if not found:
            raise NotFoundError(f"no task of {self!r} is on rank {rank}")
        return min(found, key=lambda task: task[0] in SERVICE_JOBS)

    def digest(self) -> bytes:
        """Local. 16 bytes that are equal for equal specs."""
        data = self._known_def().SerializeToString(deterministic=True)
        return hashlib.blake2b(data, digest_size=16).digest()

    def _known_def(self) -> ClusterDef:
        definition = ClusterDef()
        for name in sorted(self._jobs):
            job = definition.job.add(name=name)
            for index in sorted(self._jobs[name]):
                job.tasks[index] = self._jobs[name][index]
        return definition

    def _job(self, name: str) -> Tasks:
        if name not in self._jobs:
            raise ValueError(f"no such job: {name!r}; the jobs are {self.jobs}")
        return self._jobs[name]


def described(cluster: Any) -> Any:
    """Return the message or the dict that another library's cluster spec gives of itself.

    Anything else is returned as it is.
    """
    if not isinstance(cluster, type):
        for name in ("as_cluster_def", "as_dict"):
            describe = getattr(cluster, name, None)
            if callable(describe):
                return describe()
    return cluster


def _jobs(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Tasks]:
    jobs: dict[str, Tasks] = {}
    for name, tasks in pairs:
        job = text(name, "job name")
        if job in jobs:
            raise ValueError(f"job {job!r} is there twice: give all its tasks in one place")
        jobs[job] = _tasks(job, tasks)
    return jobs


def _tasks(job: str, tasks: Any) -> Tasks:
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
        index = index_of_task(key, f"index of a task of job {job!r}")
        if index in addresses:
            raise ValueError(f"task {index} of job {job!r} is there twice: give it one address")
        addresses[index] = text(address, f"address of task {index} of {job!r}")
    return addresses


def _port(address: str) -> int:
    _, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not <host>:<rank>")
    return int(port)
