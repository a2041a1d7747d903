"""Run the input pipeline on data tasks, which feed all workers.

Each data task runs a data worker. The first data task also runs the dispatcher. The data workers
compute the elements. Each element goes to one worker, so the workers together read one epoch.

    $ mpidist run --data 1 --worker 2 scripts/examples/data_service.py
    2 workers have read 100 batches; the sum of all elements is 332833500
    $ mpiexec -n 3 python scripts/examples/data_service.py
    2 workers have read 100 batches; the sum of all elements is 332833500

In one process, the data task is a thread:

    $ python scripts/examples/data_service.py
    1 workers have read 100 batches; the sum of all elements is 332833500
"""

import numpy as np

import mpidist
from dataservice import Dataset, distribute
from mpidist.cluster_resolver import MPIClusterResolver


def train(server: mpidist.Server, resolver: MPIClusterResolver) -> None:
    """Read the share of one worker."""
    dataset = Dataset.range(1000).map(lambda number: number**2).batch(10)
    # The code above this line runs on the data tasks, and the code below on the workers.
    dataset = dataset.apply(
        distribute(
            processing_mode="distributed_epoch",
            service=resolver.master("data", 0),
            job_name="squares",  # workers that give the same name share the epoch
        )
    )
    total = np.zeros(2, dtype=np.int64)
    for batch in dataset:
        total += (1, batch.sum())
    workers = server.job_group("worker")
    workers.all_reduce(total)
    if workers.rank() == 0:
        print(
            f"{workers.size()} workers have read {total[0]} batches; "
            f"the sum of all elements is {total[1]}"
        )


resolver = MPIClusterResolver(jobs={"data": 1, "worker": -1})
with mpidist.Server(
    resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
) as server:
    if resolver.task_type == "data":
        server.join()  # returns when the workers have ended
    else:
        train(server, resolver)
