"""Distributed training for array programs on the MPI a cluster already has."""

from mpidist import errors
from mpidist.arena import Arena
from mpidist.arrays import ReduceOp, host_view
from mpidist.cluster import ClusterSpec, Server, started_server
from mpidist.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    destroy_process_group,
    get_backend,
    get_node_local_rank,
    get_rank,
    get_world_size,
    init_process_group,
    irecv,
    is_available,
    is_initialized,
    isend,
    recv,
    reduce,
    send,
)
from mpidist.config import config as settings
from mpidist.endpoint import LATER, Address, Endpoint, Reply, Request, open_endpoint
from mpidist.errors import (
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    Error,
    GroupBrokenError,
)
from mpidist.group import ProcessGroup
from mpidist.runtime import Backoff, launched
from mpidist.window import Window
from mpidist.work import Work, gather_works

__version__ = "0.1.0"

__all__ = [
    "Address",
    "Arena",
    "Backoff",
    "ClusterSpec",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "Endpoint",
    "Error",
    "GroupBrokenError",
    "LATER",
    "ProcessGroup",
    "ReduceOp",
    "Reply",
    "Request",
    "Server",
    "Window",
    "Work",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "errors",
    "gather_works",
    "get_backend",
    "get_node_local_rank",
    "get_rank",
    "get_world_size",
    "host_view",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "launched",
    "open_endpoint",
    "recv",
    "reduce",
    "send",
    "settings",
    "started_server",
]
