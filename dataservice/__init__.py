"""Input processing shared by many trainers: datasets, a dispatcher, and data workers."""

from dataservice.client import distribute
from dataservice.config import DispatcherConfig, ShardingPolicy, WorkerConfig
from dataservice.dataset import Dataset
from dataservice.server import DispatchServer, WorkerServer

__all__ = [
    "Dataset",
    "DispatchServer",
    "DispatcherConfig",
    "ShardingPolicy",
    "WorkerConfig",
    "WorkerServer",
    "distribute",
]
