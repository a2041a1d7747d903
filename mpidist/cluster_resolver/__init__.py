"""Resolvers: which tasks a cluster has, and which one this process is."""

from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.mpi import MPIClusterResolver

__all__ = ["ClusterResolver", "MPIClusterResolver"]
