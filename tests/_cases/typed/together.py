"""A program with coalescing, meshes, grids and stores."""

import numpy as np

import mpidist as dist

group = dist.init_process_group()
rank, size = group.rank(), group.size()

gradients = [np.full(4, rank, "f4") for _ in range(8)]
with group.coalesce():  # one message for all eight
    for gradient in gradients:
        group.all_reduce(gradient, "mean")

step = group.prepare("all_reduce", gradients[0])  # checked once, for a loop
for _ in range(3):
    step()

mesh = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
shard = np.array([float(rank)])
dist.all_reduce(shard, group=mesh.get_group("shard"))

grid = dist.new_cartesian_group((size,), periodic=True)
halo = np.empty((2, 1), int)
grid.neighbor_all_gather(halo, np.array([rank]))  # from the rank before, and the one behind

store = dist.MPIStore()  # HashStore for threads, FileStore for processes
store.set(f"says {rank}", f"hello from {rank}")
said = store.get(f"says {(rank + 1) % size}")  # waits until it is there
dist.barrier()
if rank == 0:
    print(gradients[1], gradients[0], shard, halo.ravel(), said)
store.close()
