"""From what users give a Server to who it is. Pure."""

from __future__ import annotations

from typing import Any

from mpidist.cluster.arguments import is_message, text, whole_number
from mpidist.cluster.spec import ClusterSpec
from mpidist.proto.mpidist_pb2 import ConfigProto, ServerDef
from mpidist.rpc import check_protocol


def server_def(
    server_or_cluster_def: Any,
    job_name: str | None,
    task_index: int | None,
    protocol: str | None,
    config: Any,
) -> ServerDef:
    """Local. The complete description of a server.

    Args:
        server_or_cluster_def: A ServerDef, ours or another library's, or anything that a
            ClusterSpec is made from.
        job_name: Overrides the ServerDef's; inferred if there is one job.
        task_index: Overrides the ServerDef's; inferred if the job has one task.
        protocol: Overrides the ServerDef's; may stay empty for the default.
        config: A ConfigProto, ours or another library's, merged into the ServerDef's.

    Returns:
        A ServerDef of our own.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The job or the task is missing or unknown, or the protocol is unknown.
    """
    if is_message(server_or_cluster_def, "ServerDef"):
        definition = ServerDef.FromString(server_or_cluster_def.SerializeToString())
    else:
        definition = ServerDef(cluster=ClusterSpec(server_or_cluster_def).as_cluster_def())
    spec = ClusterSpec(definition.cluster)
    # Proto3 does not tell an index of 0 from none: it is one where the ServerDef has a job name.
    has_index = definition.job_name or definition.task_index
    if job_name is not None:
        definition.job_name = text(job_name, "job_name")
    elif not definition.job_name:
        definition.job_name = _only_job(spec)
    job = definition.job_name
    if task_index is not None:
        index = whole_number(task_index, "task_index")
    else:
        index = definition.task_index if has_index else _only_task(spec, job)
    spec.task_address(job, index)
    definition.task_index = index
    if protocol is not None:
        definition.protocol = text(protocol, "protocol")
    if definition.protocol:
        check_protocol(definition.protocol)
    if config is not None:
        definition.default_session_config.MergeFrom(_config(config))
    return definition


def _config(config: Any) -> ConfigProto:
    if not is_message(config, "ConfigProto"):
        raise TypeError(f"config must be a ConfigProto, not {type(config).__name__}")
    return ConfigProto.FromString(config.SerializeToString())


def _only_job(spec: ClusterSpec) -> str:
    if len(spec.jobs) != 1:
        what = f"several jobs: {spec.jobs}" if spec.jobs else "no jobs"
        raise ValueError(
            f"job_name is missing, and the cluster has {what}; a resolver's task_type is None "
            "where nothing, such as TF_CONFIG, says which task this is"
        )
    return spec.jobs[0]


def _only_task(spec: ClusterSpec, job: str) -> int:
    indices = spec.task_indices(job)
    if len(indices) != 1:
        what = f"several tasks: {indices}" if indices else "no tasks"
        raise ValueError(f"task_index is missing, and job {job!r} has {what}")
    return indices[0]
