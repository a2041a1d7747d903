"""Clusters: which jobs there are, who is who in them, and the server of each task."""

from mpidist.cluster.device_filters import ClusterDeviceFilters
from mpidist.cluster.roles import (
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    validate_cluster_spec,
    worker_count,
)
from mpidist.cluster.server import Server
from mpidist.cluster.spec import ClusterSpec
from mpidist.cluster.started import started_server

__all__ = [
    "ClusterDeviceFilters",
    "ClusterSpec",
    "Server",
    "id_in_cluster",
    "is_chief",
    "normalize_cluster_spec",
    "started_server",
    "validate_cluster_spec",
    "worker_count",
]
