"""Input processing shared by many trainers: datasets, a dispatcher, and data workers."""

from dataservice.client import (
    distribute,
    distributed_save,
    from_dataset_id,
    register_dataset,
)
from dataservice.dataset import AUTOTUNE, SHARD_HINT, ArraySpec, Dataset, Options
from dataservice.options import CrossTrainerCache, DispatcherConfig, ShardingPolicy, WorkerConfig
from dataservice.server import DispatchServer, WorkerServer
from dataservice.status import ServiceStatus, service_status

__all__ = [
    "AUTOTUNE",
    "ArraySpec",
    "CrossTrainerCache",
    "Dataset",
    "DispatchServer",
    "DispatcherConfig",
    "Options",
    "SHARD_HINT",
    "ServiceStatus",
    "ShardingPolicy",
    "WorkerConfig",
    "WorkerServer",
    "distribute",
    "distributed_save",
    "from_dataset_id",
    "register_dataset",
    "service_status",
]
