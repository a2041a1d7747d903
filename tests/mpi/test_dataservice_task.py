"""The job ``data`` of a cluster, run by mpidist.Server."""

import pytest

from dataservice import Dataset, distribute
from mpidist import Server
from mpidist.cluster_resolver import MPIClusterResolver


@pytest.mark.ranks(3, own_launch=True)
@pytest.mark.parametrize("data_tasks", [1, 2])
def test_trainers_share_the_epochs_of_the_data_job(world, data_tasks):
    resolver = MPIClusterResolver(jobs={"data": data_tasks, "worker": -1})
    spec = resolver.cluster_spec()
    elements = []
    with Server(spec, job_name=resolver.task_type, task_index=resolver.task_id) as server:
        if resolver.task_type == "data":
            server.join()
        else:
            apply = distribute("distributed_epoch", resolver.master("data", 0), job_name="train")
            dataset = Dataset.range(400).shuffle(50, seed=1).batch(8).apply(apply)
            elements = [[int(i) for batch in dataset for i in batch] for _ in range(3)]
    results = world.allgather(elements)
    for epoch in zip(*results[data_tasks:], strict=True):
        assert sorted(i for part in epoch for i in part) == list(range(400))
