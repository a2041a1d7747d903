"""Clusters: specs, roles of tasks, and the server of each task."""

from mpidist.cluster.server import Server
from mpidist.cluster.server_def import ClusterDeviceFilters
from mpidist.cluster.spec import (
    ClusterSpec,
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    validate_cluster_spec,
    worker_count,
)

__all__ = [
    "ClusterDeviceFilters",
    "ClusterSpec",
    "Server",
    "id_in_cluster",
    "is_chief",
    "normalize_cluster_spec",
    "validate_cluster_spec",
    "worker_count",
]
