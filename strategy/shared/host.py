"""A process's place in a cluster, as the strategy and its server see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpidist import ClusterSpec, Endpoint, ProcessGroup, Window, errors
from mpidist.cluster_resolver import (
    ClusterResolver,
    MPIClusterResolver,
    TFConfigClusterResolver,
)
from mpidist.config import config as settings

Bytes = NDArray[np.uint8]
Task = tuple[str, int]

# Jobs whose tasks do not train.
_NOT_WORKERS = ("ps", "data", "evaluator")

LOCAL_DEVICE = "/device:CPU:0"
"""Where variables live in local mode, unless another device is named."""

_LOCAL_DEVICE = re.compile(r"/device:(CPU:0|GPU:\d+)")
_PS_DEVICE = re.compile(rf"(/job:ps/task:\d+)(?:{_LOCAL_DEVICE.pattern})?")


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


def workers_of(spec: ClusterSpec) -> list[Task]:
    """Local. The tasks of a cluster that train, in the order that numbers them."""
    return [task for task in spec.tasks() if task[0] not in _NOT_WORKERS]


def chosen_servers(spec: ClusterSpec, devices: Sequence[str] | None) -> dict[int, int | None]:
    """Local. The ps tasks on which variables live.

    Args:
        spec: The cluster.
        devices: Names of those tasks, or of devices of theirs; None for all.

    Returns:
        Their indexes, ascending, each with the number of its GPU; None for the host.

    Raises:
        ValueError: There is none, a name is not that of a ps task or of a device of one, or a task
            is named with two devices.
    """
    servers = [index for job, index in spec.tasks() if job == "ps"]
    if not servers:
        raise ValueError(
            f"the cluster has no ps task: {spec!r} (a strategy of this process alone is given "
            "cluster_spec={})"
        )
    if devices is None:
        return dict.fromkeys(servers)
    known = {f"/job:ps/task:{index}": index for index in servers}
    found = {name: _PS_DEVICE.fullmatch(name) for name in devices}
    if not found or any(match is None or match[1] not in known for match in found.values()):
        raise ValueError(
            f"parameter_devices {list(devices)} are not among {list(known)}, each of which may be "
            "followed by /device:CPU:0 or by a GPU of its: /device:GPU:0"
        )
    chosen: dict[int, int | None] = {}
    for match in filter(None, found.values()):
        index, gpu = known[match[1]], _gpu_of(match[2])
        if chosen.setdefault(index, gpu) != gpu:
            raise ValueError(f"parameter_devices {list(devices)} name two devices of ps {index}")
    return dict(sorted(chosen.items()))


def local_gpu(spec: ClusterSpec | None, devices: Sequence[str] | None) -> int | None:
    """Local. Where variables live in local mode: the number of a GPU, or None for the host.

    Names of ps tasks are looked at, and have no effect.

    Args:
        spec: The cluster of the job that they were meant for, if it is known.
        devices: Names of its ps tasks and of their devices, or that of a local device; None for
            all.

    Raises:
        ValueError: There is none, a name cannot be one of these, or there are two local devices.
    """
    if devices is None:
        return None
    known = [LOCAL_DEVICE, "/device:GPU:0"]
    tasks = [f"/job:ps/task:{index}" for job, index in spec.tasks() if job == "ps"] if spec else []
    own, wrong = [], []
    for name in devices:
        local, task = _LOCAL_DEVICE.fullmatch(name), _PS_DEVICE.fullmatch(name)
        if local is not None:
            own.append(_gpu_of(local[1]))
        elif task is None or (spec and task[1] not in tasks):
            wrong.append(name)
    if wrong or not devices:
        what = [*known, *tasks] if spec else [*known, "/job:ps/task:0", "..."]
        raise ValueError(f"parameter_devices {list(devices)} are not among {what}")
    if len(set(own)) > 1:
        raise ValueError(f"parameter_devices {list(devices)} name two devices of this process")
    return own[0] if own else None


def _gpu_of(device: str | None) -> int | None:
    """The number in the name of a device, if it is a GPU."""
    return int(device.partition(":")[2]) if device and device.startswith("GPU") else None


def device_name(task: str, gpu: int | None) -> str:
    """Local. The name of the device of a task on which variables live."""
    return f"{task}/device:CPU:0" if gpu is None else f"{task}/device:GPU:{gpu}"


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


def described_by() -> str | None:
    """Local. Who says, without being asked, that this process is a task of a cluster with ps tasks.

    Returns:
        In words; None without, and for evaluators.

    Raises:
        InvalidArgumentError: TF_CONFIG is broken.
    """
    resolvers: dict[str, ClusterResolver] = {"TF_CONFIG": TFConfigClusterResolver()}
    if settings.jobs is not None and "ps=" in settings.jobs:  # else MPI need not be started
        resolvers["mpidist run"] = MPIClusterResolver()
    for source, resolver in resolvers.items():
        if "ps" in resolver.cluster_spec().jobs and resolver.task_type != "evaluator":
            return source
    return None


def check_alone(spec: ClusterSpec | None, task_type: str | None) -> None:
    """Local. See that a strategy without a started Server may be in local mode.

    Args:
        spec: The cluster that it is given; one without jobs asks for local mode, as None does where
            nobody describes one.
        task_type: Job of this task, if it is known: an evaluator needs no Server.

    Raises:
        FailedPreconditionError: There is a cluster, whose Server has to be started before.
    """
    if task_type == "evaluator":
        return
    source = "the strategy is given" if spec else None
    if spec is None:
        described = described_by()
        source = None if described is None else f"{described} describes"
    if source is not None:
        raise errors.FailedPreconditionError(
            f"{source} a cluster, and no Server has been started in this process: start "
            "mpidist.Server(spec, job_name, task_index) before the strategy; a strategy of this "
            "process alone is given cluster_spec={}"
        )


def needs_no_server(host: Host, spec: ClusterSpec | None) -> bool:
    """Local. Whether a strategy is in local mode though a Server has been started.

    Args:
        host: The Server.
        spec: The cluster that the strategy is given; one without jobs asks for local mode, as None
            does where the Server's has this one task.
    """
    if spec is not None:
        return not spec.jobs
    return host.job_name != "ps" and len(list(host.cluster_spec.tasks())) == 1


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
