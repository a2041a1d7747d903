"""Clusters that a batch system or a host file describes by the hosts of its tasks."""

from __future__ import annotations

import abc
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path

from mpidist.cluster import ClusterSpec
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.rank_layout import check_jobs
from mpidist.errors import FailedPreconditionError, InvalidArgumentError
from mpidist.host_list import check_host, clean_lines
from mpidist.runtime.launch import rank_hint

_LAST_PORT = 65535
_MOST_TASKS = 1_000_000


@dataclass(frozen=True)
class Placement:
    """Where tasks are.

    Attributes:
        hosts: Host of each task, by rank.
        own: Rank of this process, or None if it is not known.
    """

    hosts: tuple[str, ...]
    own: int | None


class PlacedResolver(ClusterResolver):
    """Gives the tasks that a batch system has placed on hosts to jobs, by rank.

    The addresses are ``<host>:<port>``: ``port_base`` on a host's first task, and so on. The
    subclasses say where the tasks are. ``task_type`` and ``task_id`` are told at once; both are
    None where the batch system does not say which of the tasks this process is.

    Args:
        jobs: Number of tasks of each job, in the order of their ranks; -1, for one job at most,
            takes the tasks that remain. By default all are workers.
        port_base: First port on each host.
        rpc_layer: Protocol of the addresses.

    Raises:
        InvalidArgumentError: The jobs do not fit the number of tasks, or the batch system's words
            contradict each other; also a ValueError.
        FailedPreconditionError: This process was not started by that batch system.
        TypeError: The tasks of a job are no number, or ``jobs`` is no dict.
    """

    source = "the batch system"
    """What describes the hosts, for messages."""

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._jobs = _counts({"worker": -1} if jobs is None else jobs)
        self._port_base = index(port_base)
        if not 0 < self._port_base <= _LAST_PORT:
            raise InvalidArgumentError(f"port_base {port_base} is no port: 1 to {_LAST_PORT}")
        self.rpc_layer = rpc_layer
        self.task_type, self.task_id = self.get_task_info()

    @abc.abstractmethod
    def placement(self) -> Placement:
        """Local. Where the tasks are, read anew."""

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Local. Job and index of this process, read anew; None twice if they are not known."""
        placement = self.placement()
        spec = self._by_rank(placement)
        if placement.own is None:
            return None, None
        if not 0 <= placement.own < len(placement.hosts):
            raise InvalidArgumentError(
                f"this process is rank {placement.own}, but {self.source} names "
                f"{len(placement.hosts)} tasks"
            )
        return spec.task_of(placement.own)

    def cluster_spec(self) -> ClusterSpec:
        """Local. The cluster as it is now."""
        placement = self.placement()
        spec = self._by_rank(placement)
        seen: Counter[str] = Counter()
        addresses = []
        for host in placement.hosts:
            port = self._port_base + seen[host]
            if port > _LAST_PORT:
                raise InvalidArgumentError(
                    f"port_base {self._port_base} leaves no ports for the tasks of {host}"
                )
            addresses.append(f"{host}:{port}")
            seen[host] += 1
        return ClusterSpec(
            {job: [addresses[spec.rank_of(job, index)] for index in spec.task_indices(job)]
             for job in spec.jobs}
        )  # fmt: skip

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Local. Address of a task; the empty string if none is named, and this one is not known.

        Raises:
            ValueError: There is no such task.
        """
        return self._task_address(task_type, task_id, rpc_layer) or ""

    def _by_rank(self, placement: Placement) -> ClusterSpec:
        """The cluster, with ranks for ports."""
        try:
            return ClusterSpec.from_counts(self._jobs, placement.hosts)
        except ValueError as error:
            raise InvalidArgumentError(f"{error} ({self.source})") from None


def _counts(jobs: Mapping[str, int]) -> dict[str, int]:
    """Numbers of tasks of the jobs that have some; see :class:`PlacedResolver` for errors."""
    try:
        checked = check_jobs(jobs)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    counts = {job: tasks for job, tasks in checked.items() if isinstance(tasks, int)}
    for job in set(checked) - set(counts):
        raise TypeError(
            f"{job} needs a number of tasks, not {jobs[job]!r}: ranks and rules are for "
            "MPIClusterResolver"
        )
    return counts


def needed(env: Mapping[str, str], names: tuple[str, ...], source: str, remedy: str) -> list[str]:
    """Local. Variables that a batch system sets for each task.

    Args:
        env: The environment.
        names: The variables.
        source: The batch system.
        remedy: What to do where they are missing.

    Raises:
        FailedPreconditionError: Some are missing; the message names them.
    """
    missing = [name for name in names if not env.get(name, "").strip()]
    if missing:
        raise FailedPreconditionError(
            f"{source} has not started this process: {', '.join(missing)} not set. {remedy}"
        )
    return [env[name].strip() for name in names]


def number(env: Mapping[str, str], name: str) -> int:
    """Local. A variable as a number; InvalidArgumentError if it is none."""
    text = env.get(name, "").strip()
    if not is_number(text):
        raise InvalidArgumentError(f"{name}={text!r} is no number")
    return int(text)


def is_number(text: str) -> bool:
    """Local. Whether a text is a whole number in plain digits, and not absurdly long."""
    return text.isascii() and text.isdigit() and len(text) < 10


def own_rank(env: Mapping[str, str] | None = None, *others: str) -> int | None:
    """Local. Rank of this process as its launcher gave it.

    Args:
        env: By default ``os.environ``.
        others: Variables that say it where no MPI launcher does.

    Raises:
        InvalidArgumentError: The first of them that is set is no number.
    """
    env = os.environ if env is None else env
    rank = rank_hint(env)
    for name in others:
        if rank is None and name in env:
            rank = number(env, name)
    return rank


def read_lines(path: str, source: str) -> list[str]:
    """Return the lines of a file of hosts, without comments and empty ones.

    Raises:
        FailedPreconditionError: It cannot be read, or has no hosts.
    """
    try:
        lines = clean_lines(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPreconditionError(
            f"the hosts of {source} cannot be read from {path}: {error}"
        ) from None
    if not lines:
        raise FailedPreconditionError(f"the file {path} of {source} names no hosts")
    return lines


def slots(pairs: list[tuple[str, int]], source: str) -> tuple[str, ...]:
    """Return one host for each task, in their order.

    Args:
        pairs: Hosts, each with its number of tasks.
        source: Where they were found, for messages.

    Raises:
        InvalidArgumentError: A name cannot be a host's, or there are more than a million tasks.
    """
    if sum(count for _, count in pairs) > _MOST_TASKS:
        raise InvalidArgumentError(f"more than {_MOST_TASKS} tasks on {pairs[0][0]} and others")
    for host, _ in pairs:
        check_host(host, source)
    return tuple(host for host, count in pairs for _ in range(count))
