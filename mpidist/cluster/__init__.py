"""Clusters: which jobs there are, and the server of each task."""

from mpidist.cluster.server import Server, started_server
from mpidist.cluster.spec import ClusterSpec

__all__ = ["ClusterSpec", "Server", "started_server"]
