"""The interface of a Server, and the choice between a cluster and local mode."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
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

_LOCAL_DEVICES = (LOCAL_DEVICE, "/device:GPU:0")
# The lookahead refuses the empty name, because either half of a name may be missing.
_DEVICE = re.compile(r"(?!$)(/job:ps/task:\d+|)(?:/device:(?:CPU:0|GPU:(\d+)))?")


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

    def task_group(self, tasks: Sequence[Task], name: str) -> ProcessGroup | None:
        """Collective over the tasks. Return a new process group; None in a single process."""

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
    tasks = {f"/job:ps/task:{index}": index for index in servers}
    gpus = _gpus(devices, tasks, list(tasks))
    return {index: gpus[task] for task, index in tasks.items() if task in gpus}


def local_gpu(spec: ClusterSpec | None, devices: Sequence[str] | None) -> int | None:
    """Return the index of the GPU that holds variables in local mode, or None for the host.

    Names of ps tasks are checked but have no effect.

    Args:
        spec: The cluster of the job, if it is known.
        devices: Names of ps tasks of that cluster, of their devices, or of a local device; None
            for the default.

    Raises:
        ValueError: ``devices`` is empty, a name is not valid, or two devices of this process or of
            a ps task are named.
    """
    if devices is None:
        return None
    if not spec:
        return _gpus(devices, None, [*_LOCAL_DEVICES, "/job:ps/task:0", "..."]).get("")
    tasks = [f"/job:ps/task:{index}" for job, index in spec.tasks() if job == "ps"]
    return _gpus(devices, ["", *tasks], [*_LOCAL_DEVICES, *tasks]).get("")


def _gpus(
    devices: Sequence[str], tasks: Collection[str] | None, known: Sequence[str]
) -> dict[str, int | None]:
    """Return the tasks that devices name, each with its GPU index, or None for the host.

    Args:
        devices: Names of ps tasks or of devices. A device without a task belongs to the task "",
            which is this process.
        tasks: The valid tasks; None if all are valid.
        known: Valid names, for messages.

    Raises:
        ValueError: There is no name, a name is not valid, or a task is named with two devices.
    """
    found = [_DEVICE.fullmatch(name) for name in devices]
    valid = [match for match in found if match and (tasks is None or match[1] in tasks)]
    if not devices or len(valid) < len(devices):
        raise ValueError(
            f"parameter_devices {list(devices)} are not among {list(known)}; a ps task may be "
            "followed by /device:CPU:0 or by one of its GPUs, such as /device:GPU:0"
        )
    gpus: dict[str, int | None] = {}
    for task, number in [match.groups() for match in valid]:
        gpu = None if number is None else int(number)
        if gpus.setdefault(task, gpu) != gpu:
            owner = f"ps {task.rpartition(':')[2]}" if task else "this process"
            raise ValueError(f"parameter_devices {list(devices)} name two devices of {owner}")
    return gpus


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
