"""Input processing shared by many trainers: datasets, a dispatcher, and data workers.

A dataset has the methods of tf.data. Workers of a data service evaluate it for the trainers::

    dispatcher = DispatchServer()
    worker = WorkerServer(dispatcher_address=dispatcher.target)
    dataset = Dataset.range(10).map(lambda x: x * x).batch(5)
    dataset = dataset.apply(distribute("distributed_epoch", dispatcher.target))
    for batch in dataset:
        print(batch)

``python -m dataservice`` starts servers in processes of their own. ``dataservice.torch`` wraps a
dataset for torch's DataLoader. docs/tutorials/input_pipeline.md has complete programs.
"""

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
