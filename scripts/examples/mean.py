"""Average an array over all ranks with all_reduce.

Under mpidist run:

    $ mpidist run -n 4 scripts/examples/mean.py
    mean of 4 ranks: [1.5 1.5 1.5]

Under the launcher of your MPI library (Open MPI's needs --oversubscribe for more ranks than cores):

    $ mpiexec -n 4 python scripts/examples/mean.py
    mean of 4 ranks: [1.5 1.5 1.5]

As one process:

    $ python scripts/examples/mean.py
    mean of 1 ranks: [0. 0. 0.]
"""

import numpy as np

import mpidist as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()

array = np.full(3, rank, dtype="float32")
work = dist.all_reduce(array, op="mean", async_op=True)
# Compute something else here. Do not use the array before wait() has returned.
work.wait()

if rank == 0:
    print(f"mean of {size} ranks:", array)
