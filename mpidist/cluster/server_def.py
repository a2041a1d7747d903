"""Server definitions: the complete description of a server, and the device filters in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpidist.cluster.spec import ClusterSpec, as_integer, as_task_index, as_text, is_message
from mpidist.proto import mpidist_pb2
from mpidist.proto.mpidist_pb2 import ConfigProto, ServerDef
from mpidist.rpc import check_protocol


def server_def(
    server_or_cluster_def: Any,
    job_name: str | None,
    task_index: int | None,
    protocol: str | None,
    config: Any,
) -> ServerDef:
    """Return the complete description of a server.

    Args:
        server_or_cluster_def: A ServerDef of any library, or an argument of a ClusterSpec.
        job_name: Overrides the ServerDef's; defaults to the only job.
        task_index: Overrides the ServerDef's; defaults to the only task of the job.
        protocol: Overrides the ServerDef's; empty for the default protocol.
        config: A ConfigProto of any library. It is merged into the ServerDef's.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The job or the task is missing or unknown, or the protocol is unknown.
    """
    if is_message(server_or_cluster_def, "ServerDef"):
        definition = ServerDef.FromString(server_or_cluster_def.SerializeToString())
    else:
        definition = ServerDef(cluster=ClusterSpec(server_or_cluster_def).as_cluster_def())
    spec = ClusterSpec(definition.cluster)
    # Proto3 does not distinguish index 0 from a missing index. With a job name it is index 0.
    has_index = definition.job_name or definition.task_index
    if job_name is not None:
        definition.job_name = as_text(job_name, "job_name")
    elif not definition.job_name:
        definition.job_name = _only_job(spec)
    job = definition.job_name
    if task_index is not None:
        index = as_integer(task_index, "task_index")
    else:
        index = definition.task_index if has_index else _only_task(spec, job)
    spec.task_address(job, index)
    definition.task_index = index
    if protocol is not None:
        definition.protocol = as_text(protocol, "protocol")
    if definition.protocol:
        check_protocol(definition.protocol)
    if config is not None:
        if not is_message(config, "ConfigProto"):
            raise TypeError(f"config must be a ConfigProto, not {type(config).__name__}")
        known = ConfigProto.FromString(config.SerializeToString())
        definition.default_session_config.MergeFrom(known)
    return definition


class ClusterDeviceFilters:
    """Device filters of the tasks of a cluster; as ``tf.train.ClusterDeviceFilters``.

    The filters are stored in a ServerDef and passed on. A task without filters sees all devices.
    Every task sees its own devices.
    """

    def __init__(self) -> None:
        self._filters: dict[str, dict[int, list[str]]] = {}

    def set_device_filters(
        self, job_name: str, task_index: int, device_filters: Sequence[str]
    ) -> None:
        """Set the device filters of a task. Earlier filters of the task are replaced.

        Args:
            job_name: Job of the task.
            task_index: Index of the task.
            device_filters: For example ``["/job:ps", "/job:worker/task:1"]``.

        Raises:
            TypeError: The filters are not a list of strings, the job name is not a string, or the
                index is not a number.
            ValueError: The index is out of range.
        """
        if isinstance(device_filters, str) or not isinstance(device_filters, Iterable):
            raise TypeError(f"device_filters is a list of strings, not {device_filters!r}")
        filters = list(device_filters)
        if any(not isinstance(each, str) for each in filters):
            raise TypeError(f"device_filters is a list of strings, not {filters!r}")
        job = as_text(job_name, "job_name")
        index = as_task_index(task_index, f"index of a task of job {job!r}")
        self._filters.setdefault(job, {})[index] = filters

    def as_cluster_device_filters(self) -> mpidist_pb2.ClusterDeviceFilters:
        """Return the protobuf message, with jobs sorted by name and tasks by index."""
        message = mpidist_pb2.ClusterDeviceFilters()
        for name in sorted(self._filters):
            job = message.jobs.add(name=name)
            for index, filters in sorted(self._filters[name].items()):
                job.tasks[index].device_filters.extend(filters)
        return message

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterDeviceFilters):
            return self._filters == other._filters
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


def _only_job(spec: ClusterSpec) -> str:
    if len(spec.jobs) != 1:
        found = f"several jobs: {spec.jobs}" if spec.jobs else "no jobs"
        raise ValueError(
            f"job_name is missing, and the cluster has {found}; a resolver's task_type is None "
            "where nothing, such as TF_CONFIG, says which task this is"
        )
    return spec.jobs[0]


def _only_task(spec: ClusterSpec, job: str) -> int:
    indices = spec.task_indices(job)
    if len(indices) != 1:
        found = f"several tasks: {indices}" if indices else "no tasks"
        raise ValueError(f"task_index is missing, and job {job!r} has {found}")
    return indices[0]
