"""The script that ``mpidist doctor`` runs on two ranks: check MPI, and measure its speed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import numpy as np

import mpidist

_ROUNDS = 200
_LARGE = np.ones((4 << 20) // 8)


def main() -> None:
    """Collective. Try collectives and one-sided operations; rank 0 prints the facts as JSON."""
    group = mpidist.init_process_group()
    rank, size = group.rank(), group.size()
    sums = np.full(1000, rank + 1.0)
    group.all_reduce(sums)
    window = mpidist.Window.rma(group.comm, 8)
    window.put((rank + 1) % size, 0, np.array([rank + 1.0]))
    group.barrier()
    put = np.zeros(1)
    window.get(rank, 0, put)
    window.free()
    wrong = np.array(
        [(sums != size * (size + 1) / 2).any(), put[0] != (rank - 1) % size + 1], np.uint8
    )
    group.all_reduce(wrong, "max")
    small = np.zeros(1)
    facts = {
        "ranks": size,
        "thread_level": "multiple",  # a world with less is refused
        "sums_are_right": not wrong[0],
        "one_sided_is_right": not wrong[1],
        "all_reduce_us": 1e6 * _seconds(lambda: group.all_reduce(small)),
        "broadcast_gib_s": _LARGE.nbytes / 2**30 / _seconds(lambda: group.broadcast(_LARGE, 0)),
    }
    if rank == 0:
        facts["gpu_rule"] = str(group.gpu_rule)
        os.write(1, f"{json.dumps(facts)}\n".encode())


def _seconds(call: Callable[[], object]) -> float:
    """Return the median duration of a call."""
    taken = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


if __name__ == "__main__":
    main()
