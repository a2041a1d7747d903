"""A process's place in a cluster, as the strategy and its server see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpidist import ClusterSpec, Endpoint, ProcessGroup, Window, errors, open_endpoint
from mpidist.cluster_resolver import ClusterResolver, TFConfigClusterResolver

Bytes = NDArray[np.uint8]
Task = tuple[str, int]

# Jobs whose tasks do not train.
_NOT_WORKERS = ("ps", "data", "evaluator")
_LOCAL_ARENA_BYTES = 1 << 36  # address space only: pages come with the first write


class HostMemory(Protocol):
    """Memory of ps tasks, in numbered segments."""

    sync: Callable[[], None]
    """Local. Orders loads and stores before the call against those after it."""

    def part(self, index: int, segment: int = 0) -> Bytes | None:
        """Local. A segment of a ps task's memory, or None if it cannot be reached."""

    def own(self, segment: int = 0) -> Bytes:
        """Local. A segment of the memory of this process's ps task."""

    def window(self, index: int, segment: int) -> tuple[Window, int]:
        """Local. The window of a segment of a ps task, and the rank of the ps in it."""

    def mates(self, index: int, one_sided: bool = False) -> list[Task]:
        """Local. Tasks in other processes that share, or can share, memory with a ps task."""

    def growth_bytes(self, index: int, needed: int, wanted: int) -> int:
        """Local. How long a further segment can be; 0 if there cannot be one."""

    def grow(
        self,
        index: int,
        segment: int,
        nbytes: int,
        tasks: Sequence[Task],
        one_sided: bool = False,
    ) -> None:
        """Collective over a ps task and the tasks. Make a further segment of its memory."""

    def warn_unshared(self, reason: str) -> None:
        """Local. Say, once, that memory of this process's ps task cannot be shared."""


class Host(Protocol):
    """The part of :class:`mpidist.Server` that is used here."""

    @property
    def endpoint(self) -> Endpoint:
        """Serves this process's tasks."""

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster."""

    @property
    def job_name(self) -> str:
        """Job of the script's task."""

    @property
    def task_index(self) -> int:
        """Index of the script's task."""

    def own_index(self, job: str) -> int:
        """Local. Index of this process's task of a job."""

    def task_address(self, job: str, index: int) -> str:
        """Local. Address of the endpoint of a task."""

    @property
    def memory(self) -> HostMemory:
        """Memory of the ps tasks, as far as this process reaches it."""

    def has_left(self, job: str, index: int) -> bool:
        """Local. Whether a task of the cluster has ended, or has closed its Server."""

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Local. Have ``callback()`` called before the process leaves the cluster."""

    def job_group(self, job: str) -> ProcessGroup:
        """Collective over the tasks of the job. Their process group."""


class LocalMemory:
    """The memory of the one ps task of local mode."""

    def __init__(self) -> None:
        self._windows = [Window.private(_LOCAL_ARENA_BYTES)]
        self.sync = self._windows[0].sync  # which is as good for the others: they are private too

    def part(self, index: int, segment: int = 0) -> Bytes | None:
        """Local. A segment."""
        return self._windows[segment].local

    def own(self, segment: int = 0) -> Bytes:
        """Local. A segment."""
        return self._windows[segment].local

    def window(self, index: int, segment: int) -> tuple[Window, int]:
        """Local. The window of a segment."""
        return self._windows[segment], 0

    def mates(self, index: int, one_sided: bool = False) -> list[Task]:
        """Local. None: there is no other process."""
        return []

    def growth_bytes(self, index: int, needed: int, wanted: int) -> int:
        """Local. All that is wanted: pages come with the first write."""
        return wanted

    def grow(
        self,
        index: int,
        segment: int,
        nbytes: int,
        tasks: Sequence[Task],
        one_sided: bool = False,
    ) -> None:
        """Local. See :class:`HostMemory`."""
        self._windows.append(Window.private(nbytes))

    def warn_unshared(self, reason: str) -> None:
        """Local. Nothing to say: nobody but this process reads what lies here."""


class LocalHost:
    """A cluster of one ps and one worker inside this process, for local mode."""

    def __init__(self) -> None:
        self.memory: HostMemory = LocalMemory()
        self.endpoint = open_endpoint("inproc")
        self.cluster_spec = ClusterSpec({"ps": ["localhost:0"], "worker": ["localhost:0"]})
        self.job_name = "worker"
        self.task_index = 0

    def own_index(self, job: str) -> int:
        """Local. Always 0."""
        return 0

    def task_address(self, job: str, index: int) -> str:
        """Local. The one endpoint's address."""
        return str(self.endpoint.address)

    def has_left(self, job: str, index: int) -> bool:
        """Local. False: there is no other process."""
        return False

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Local. Nothing to do: nobody but this process waits for what is under way."""

    def job_group(self, job: str) -> ProcessGroup:
        """Local. FailedPreconditionError: there is no job to group."""
        raise errors.FailedPreconditionError("in local mode there is no process group")


def workers_of(spec: ClusterSpec) -> list[Task]:
    """Local. The tasks of a cluster that train, in the order that numbers them."""
    return [task for task in spec.tasks() if task[0] not in _NOT_WORKERS]


def chosen_servers(spec: ClusterSpec, devices: Sequence[str] | None) -> list[int]:
    """Local. Indexes of the ps tasks on which variables live.

    Args:
        spec: The cluster.
        devices: Names of those tasks; None for all.

    Raises:
        ValueError: There is none, or a name is not that of a ps task.
    """
    servers = [index for job, index in spec.tasks() if job == "ps"]
    if not servers:
        raise ValueError(f"the cluster has no ps task: {spec!r}")
    if devices is None:
        return servers
    known = {f"/job:ps/task:{index}": index for index in servers}
    wrong = [name for name in devices if name not in known]
    if wrong or not devices:
        raise ValueError(f"parameter_devices {list(devices)} are not among {list(known)}")
    return sorted({known[name] for name in devices})


def given_spec(first: Any, spec: Any) -> ClusterSpec | None:
    """Local. The cluster that a strategy's arguments name.

    Args:
        first: ``cluster_resolver``.
        spec: ``cluster_spec``.

    Returns:
        The cluster, or None if neither was given.

    Raises:
        ValueError: Both were given.
    """
    if first is not None and spec is not None:
        raise ValueError("give cluster_resolver or cluster_spec, not both")
    source = first if first is not None else spec
    if source is None:
        return None
    return source.cluster_spec() if isinstance(source, ClusterResolver) else ClusterSpec(source)


def described_spec() -> ClusterSpec | None:
    """Local. The cluster with ps tasks that TF_CONFIG describes; None without, and for evaluators.

    Raises:
        InvalidArgumentError: TF_CONFIG is broken.
    """
    resolver = TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    return spec if "ps" in spec.jobs and resolver.task_type != "evaluator" else None


def check_task(
    host: Host, spec: ClusterSpec | None, task_type: str | None, task_id: int | None
) -> None:
    """Local. ValueError if what a strategy is given differs from the started Server's."""
    if spec is not None and spec != host.cluster_spec:
        raise ValueError(
            f"the strategy is given {spec!r}, and the started Server is of {host.cluster_spec!r}"
        )
    for what, given, true in (
        ("task_type", task_type, host.job_name),
        ("task_id", task_id, host.task_index),
    ):
        if given is not None and given != true:
            raise ValueError(f"{what} is {given!r}, and that of the started Server {true!r}")
