"""Read an input pipeline in the training processes themselves, without a data service.

Each rank reads its own share of a shuffled dataset. map() works ahead in threads. The saved state
of an iterator continues the epoch later, also in another process.

    $ mpidist run -n 2 scripts/examples/data_local.py
    batches of each rank: [13, 12]
    sum of all elements: 4950
    same rest of the epoch after a restart: True
    $ mpiexec -n 2 python scripts/examples/data_local.py
    batches of each rank: [13, 12]
    sum of all elements: 4950
    same rest of the epoch after a restart: True
    $ python scripts/examples/data_local.py
    batches of each rank: [25]
    sum of all elements: 4950
    same rest of the epoch after a restart: True
"""

from typing import Any

import numpy as np

import mpidist as dist
from dataservice import Dataset


def decode(number: np.int64) -> dict[str, Any]:
    """Make an example of a number. A real program decodes an image here."""
    return {"image": np.full((8, 8), number, dtype="float32"), "label": number}


group = dist.init_process_group()
rank, size = group.rank(), group.size()

dataset = (
    Dataset.range(100)
    .shuffle(100, seed=1)  # the same order on all ranks
    .map(decode, num_parallel_calls=2)
    .batch(4)
    .shard(size, rank)  # every size-th batch
    .prefetch(2)
)
batches = iter(dataset)
first = [next(batches) for _ in range(5)]
state = batches.get_state()  # bytes, to be kept in a checkpoint
rest = [batch["label"].tolist() for batch in batches]

restarted = iter(dataset)
restarted.set_state(state)
same = [batch["label"].tolist() for batch in restarted] == rest

counts = [None] * size
group.all_gather_object(counts, len(first) + len(rest))
total = np.array(sum(int(batch["label"].sum()) for batch in first) + sum(map(sum, rest)))
group.all_reduce(total)
if rank == 0:
    print(f"batches of each rank: {counts}\nsum of all elements: {total}")
    print("same rest of the epoch after a restart:", same)
