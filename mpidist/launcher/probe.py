"""The checks of ``mpidist doctor`` that may crash or hang, in processes of their own.

``python probe.py gpus`` checks the GPUs of this host. ``mpidist run -n 2 probe.py ranks`` checks
MPI. Each finding is a line of JSON: a list of name, verdict, fact and remedy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

import mpidist
from mpidist.cluster_resolver.accelerators import visible_gpus
from mpidist.errors import FailedPreconditionError
from mpidist.gpu import Prefetcher, cupy, device_count

_ROUNDS = 200
_LARGE = np.ones((4 << 20) // 8)


def tell(name: str, fact: str, verdict: str = "ok", remedy: str = "") -> None:
    """Print a finding; see :class:`mpidist.launcher.doctor.Finding`."""
    os.write(1, f"{json.dumps([name, verdict, fact, remedy])}\n".encode())


def check_gpus() -> None:
    """Count the GPUs, and copy numbers to each and back."""
    gpus = len(visible_gpus(os.environ))
    tell("GPUs", f"{gpus} that this process may use")
    if find_spec("cupy") is None:
        if gpus:
            remedy = "pip install 'mpidist[cuda13]', or [cuda12], as the driver needs"
            fact = "none, without which arrays on GPUs cannot be sent"
            tell("CuPy", fact, "warning", f"{remedy} (see nvidia-smi)")
        return
    try:
        count = copy_to_gpus()
    except FailedPreconditionError as error:
        verdict = "problem" if gpus else "warning"
        remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        tell("CuPy", f"no GPU can be used: {error.__cause__ or error}", verdict, remedy)
    else:
        tell("CuPy", f"{cupy().__version__}: copies to and from {count} GPUs arrive")


def copy_to_gpus() -> int:
    """Copy numbers to each GPU and back. Return the number of GPUs."""
    count = device_count()
    numbers = np.arange(1 << 16)
    for number in range(count):
        (array,) = Prefetcher(number).send([numbers]).hand_over()
        if not np.array_equal(mpidist.host_view(array), numbers):
            sys.exit(f"GPU {number} gives other numbers than it was given")
    return count


def check_ranks() -> None:
    """Collective. Try collectives and one-sided operations, and measure their speed."""
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
    all_reduce_s = _median_s(lambda: group.all_reduce(small))
    broadcast_s = _median_s(lambda: group.broadcast(_LARGE, 0))
    if rank:
        return
    tell("two ranks", f"a world of {size}, thread level multiple")
    if wrong[0]:
        remedy = "this MPI library adds wrongly on this machine: take another version"
        tell("collectives", "sums are wrong", "problem", remedy)
    else:
        tell(
            "collectives",
            f"all_reduce of 8 B in {1e6 * all_reduce_s:.1f} us, broadcast of 4 MiB at "
            f"{_LARGE.nbytes / 2**30 / broadcast_s:.1f} GiB/s",
        )
    if wrong[1]:
        remedy = 'leave ParameterServerStrategy(transport="rma") out'
        tell("one-sided", "a put was lost", "problem", remedy)
    else:
        tell("one-sided", "put and get work")
    tell("GPU memory", str(group.gpu_rule))


def _median_s(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


if __name__ == "__main__":
    {"gpus": check_gpus, "ranks": check_ranks}[sys.argv[1]]()
