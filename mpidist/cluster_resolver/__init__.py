"""Cluster resolvers: find the tasks of a cluster, and the task of this process."""

from mpidist.cluster_resolver.auto import auto
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.batch_systems import (
    LSFClusterResolver,
    MPIJobClusterResolver,
    PBSClusterResolver,
    SGEClusterResolver,
)
from mpidist.cluster_resolver.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from mpidist.cluster_resolver.mpi import MPIClusterResolver
from mpidist.cluster_resolver.simple import SimpleClusterResolver, UnionResolver
from mpidist.cluster_resolver.slurm import SlurmClusterResolver
from mpidist.cluster_resolver.tf_config import TFConfigClusterResolver

__all__ = [
    "ClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "LSFClusterResolver",
    "MPIClusterResolver",
    "MPIJobClusterResolver",
    "PBSClusterResolver",
    "SGEClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
    "auto",
]
