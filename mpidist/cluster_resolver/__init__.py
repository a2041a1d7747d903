"""Resolvers: which tasks a cluster has, and which one this process is."""

from mpidist.cluster_resolver.auto import auto
from mpidist.cluster_resolver.base import ClusterResolver
from mpidist.cluster_resolver.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    MPIJobClusterResolver,
)
from mpidist.cluster_resolver.lsf import LSFClusterResolver
from mpidist.cluster_resolver.mpi import MPIClusterResolver
from mpidist.cluster_resolver.pbs import PBSClusterResolver
from mpidist.cluster_resolver.sge import SGEClusterResolver
from mpidist.cluster_resolver.simple import SimpleClusterResolver
from mpidist.cluster_resolver.slurm import SlurmClusterResolver
from mpidist.cluster_resolver.tf_config import TFConfigClusterResolver
from mpidist.cluster_resolver.union import UnionResolver

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
