"""What ``mpidist doctor`` runs on two ranks with GPUs: which ways are there between them?"""

from __future__ import annotations

import json
import os

import mpidist
from mpidist.cuda import cupy, device_count, make_current


def main() -> None:
    """Collective. Reduce an array on the GPUs; rank 0 prints the table of the ways, as JSON."""
    group = mpidist.init_process_group("cpu:mpi,cuda:nccl")
    assert isinstance(group, mpidist.DirectGroup)
    make_current(group.rank() % device_count())
    group.all_reduce(cupy().ones(1 << 20, "f4"))
    if group.rank() == 0:
        os.write(1, f"{json.dumps({'table': str(group.ways)})}\n".encode())


if __name__ == "__main__":
    main()
