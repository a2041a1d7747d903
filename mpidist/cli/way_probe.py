"""Print which ways there are between GPUs; ``mpidist doctor`` runs it on two ranks."""

from __future__ import annotations

import json
import os

import mpidist
from mpidist.cuda import cupy, device_count, make_current


def main() -> None:
    """Collective. Reduce an array on the GPUs; rank 0 prints the table of the ways, as JSON."""
    group = mpidist.init_process_group("cpu:mpi,cuda:nccl")
    table = "MPIDIST_GPU_WAY=staged: all arrays on GPUs go through the host"
    if isinstance(group, mpidist.DirectGroup):
        make_current(group.rank() % device_count())
        group.all_reduce(cupy().ones(1 << 20, "f4"))
        table = str(group.ways)
    if group.rank() == 0:
        os.write(1, f"{json.dumps({'table': table})}\n".encode())


if __name__ == "__main__":
    main()
