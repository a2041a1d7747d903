"""The interface of a Server, and the choice between a cluster and local mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpidist import ClusterSpec, Endpoint, ProcessGroup, errors
from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver, TFConfigClusterResolver
from mpidist.config import config as settings
from mpidist.ps_memory import PsMemory

Bytes = NDArray[np.uint8]
Task = tuple[str, int]

# Jobs whose tasks do not train.
_NOT_WORKERS = ("ps", "data", "evaluator")

LOCAL_DEVICE = "/device:CPU:0"
"""Default device of variables in local mode."""

_LOCAL_DEVICE = re.compile(r"/device:(CPU:0|GPU:\d+)")
_PS_DEVICE = re.compile(rf"(/job:ps/task:\d+)(?:{_LOCAL_DEVICE.pattern})?")


class Host(Protocol):
    """The part of the interface of :class:`mpidist.Server` that strategies use."""

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that serves this process's tasks."""

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster spec."""

    @property
    def job_name(self) -> str:
        """The job of the script's task."""

    @property
    def task_index(self) -> int:
        """The index of the script's task."""

    def own_index(self, job: str) -> int:
        """Return the index of this process's task of a job."""

    def task_address(self, job: str, index: int) -> str:
        """Return the address of a task's endpoint."""

    @property
    def memory(self) -> PsMemory:
        """The memory of the ps tasks."""

    def has_left(self, job: str, index: int) -> bool:
        """Return whether a task of the cluster has ended, or has closed its Server."""

    def on_drain(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a function to call before the process leaves the cluster.

        Returns:
            A function that removes the registration.
        """

    def job_group(self, job: str) -> ProcessGroup:
        """Collective over the tasks of the job. Return their process group."""


def workers_of(spec: ClusterSpec) -> list[Task]:
    """Return the tasks of a cluster that train, in the order of their worker indices."""
    return [task for task in spec.tasks() if task[0] not in _NOT_WORKERS]


def chosen_servers(spec: ClusterSpec, devices: Sequence[str] | None) -> dict[int, int | None]:
    """Return the ps tasks that hold variables.

    Args:
        spec: The cluster.
        devices: Names of ps tasks or of their devices; None for all ps tasks.

    Returns:
        A dict from the index of each task, ascending, to the index of its GPU, or None for the
        host.

    Raises:
        ValueError: There is no ps task, a name is not the name of a ps task or of its device, or a
            task is named with two devices.
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
    """Return the index of the GPU that holds variables in local mode, or None for the host.

    Names of ps tasks are checked but have no effect.

    Args:
        spec: The cluster of the job, if it is known.
        devices: Names of ps tasks of that cluster, of their devices, or of a local device; None
            for the default.

    Raises:
        ValueError: ``devices`` is empty, a name is not valid, or two local devices are named.
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
    """Return the index in the name of a GPU; None for other devices."""
    return int(device.partition(":")[2]) if device and device.startswith("GPU") else None


def device_name(task: str, gpu: int | None) -> str:
    """Return the name of a task's device that holds variables."""
    return f"{task}/device:CPU:0" if gpu is None else f"{task}/device:GPU:{gpu}"


def given_spec(first: Any, spec: Any) -> ClusterSpec | None:
    """Return the cluster in the arguments of a strategy.

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
    """Return the source in the environment that describes a cluster with ps tasks.

    Returns:
        ``"TF_CONFIG"`` or ``"mpidist run"``; None for evaluators and without such a cluster.

    Raises:
        InvalidArgumentError: TF_CONFIG is not valid.
    """
    resolvers: dict[str, ClusterResolver] = {"TF_CONFIG": TFConfigClusterResolver()}
    if settings.jobs is not None and "ps=" in settings.jobs:  # avoids starting MPI otherwise
        resolvers["mpidist run"] = MPIClusterResolver()
    for source, resolver in resolvers.items():
        if "ps" in resolver.cluster_spec().jobs and resolver.task_type != "evaluator":
            return source
    return None


def check_alone(spec: ClusterSpec | None, task_type: str | None) -> None:
    """Check that a strategy without a started Server may use local mode.

    Args:
        spec: The cluster given to the strategy. A cluster without jobs requests local mode. None
            does so unless the environment describes a cluster.
        task_type: Job of this task, if it is known. An evaluator needs no Server.

    Raises:
        FailedPreconditionError: There is a cluster, so a Server must be started first.
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
    """Return whether a strategy uses local mode although a Server has been started.

    Args:
        host: The Server.
        spec: The cluster given to the strategy. A cluster without jobs requests local mode. None
            does so if the Server's cluster has only this task and its job is not ``ps``.
    """
    if spec is not None:
        return not spec.jobs
    return host.job_name != "ps" and len(list(host.cluster_spec.tasks())) == 1


def check_task(
    host: Host, spec: ClusterSpec | None, task_type: str | None, task_id: int | None
) -> None:
    """Raise ValueError if the arguments of a strategy differ from the started Server."""
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
