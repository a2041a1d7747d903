"""Average many small gradients in one message.

Every message has a fixed cost, so many small messages are slow. A coalesce() block collects
all_reduces and sends them together. prepare() checks the arguments of a repeated operation once.

    $ mpidist run -n 4 scripts/examples/coalesce.py
    8 gradients, averaged together: 1.5 2.5 3.5 4.5 5.5 6.5 7.5 8.5
    sum after 3 rounds: [6. 6. 6. 6.]
    $ mpiexec -n 4 python scripts/examples/coalesce.py
    8 gradients, averaged together: 1.5 2.5 3.5 4.5 5.5 6.5 7.5 8.5
    sum after 3 rounds: [6. 6. 6. 6.]
    $ python scripts/examples/coalesce.py
    8 gradients, averaged together: 0.0 1.0 2.0 3.0 4.0 5.0 6.0 7.0
    sum after 3 rounds: [0. 0. 0. 0.]
"""

import numpy as np

import mpidist as dist

group = dist.init_process_group()
rank = group.rank()

gradients = [np.full(100, rank + layer, dtype="float32") for layer in range(8)]
with group.coalesce():
    for gradient in gradients:
        group.all_reduce(gradient, op="mean")
# The results are in the arrays after the block.
if rank == 0:
    print(f"{len(gradients)} gradients, averaged together:", *(float(g[0]) for g in gradients))

values = np.empty(4, dtype="float32")
sum_values = group.prepare("all_reduce", values, op="sum")
for _ in range(3):
    values[:] = rank  # the operation always uses the same array
    sum_values()
if rank == 0:
    print("sum after 3 rounds:", values)
