"""Time steps in each mode with one slow worker.

    mpidist run --ps 1 --worker 3 scripts/bench_modes.py [--json results.json]

Every worker sleeps in place of a computation, then pushes a gradient of 1 MiB. The last worker
sleeps longer. A figure is the median time of the steps of the first worker, in milliseconds. "of
sync" is the time in mode sync over the time in this mode. The modes take turns.
"""

import argparse
import statistics
import time

import numpy as np
from _bench import report

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

MODES = {
    "async": {"mode": "async"},
    "ssp, staleness 4": {"mode": "ssp", "staleness": 4},
    "sync": {"mode": "sync"},
    "sync, 1 backup worker": {"mode": "sync", "backup_workers": 1},
}
ELEMENTS = 1 << 18


def main():
    """Run the ps or a worker."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute-ms", type=float, default=5.0)
    parser.add_argument("--slow-ms", type=float, default=50.0)
    args = parser.parse_args()
    resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
    with mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        if resolver.task_type == "ps":
            server.join()
        else:
            compare(args, server)


def compare(args, server):
    """Measure on all workers and report on the first worker."""
    workers = server.job_group("worker")
    slow = workers.rank() == workers.size() - 1 > 0
    compute_s = (args.slow_ms if slow else args.compute_ms) / 1e3
    times = {name: [] for name in MODES}
    for number in range(args.rounds):
        for name, options in MODES.items():
            workers.barrier()
            times[name] += steps(f"{name} {number}", options, args.steps, compute_s)
            workers.barrier()
    if workers.rank() == 0:
        medians = {name: 1e3 * statistics.median(own) for name, own in times.items()}
        rows = [[name, own, medians["sync"] / own] for name, own in medians.items()]
        facts = {"workers": workers.size(), "compute ms": args.compute_ms, "slow ms": args.slow_ms}
        report("a step", ["mode", "ms", "of sync"], rows, facts, args.json)


def steps(name, options, count, compute_s):
    """Return the seconds of each step of this worker."""
    strategy = ParameterServerStrategy(**options, name=name)
    with strategy.scope():
        variable = get_variable(name, ELEMENTS, initializer="zeros")
    gradient = np.ones(ELEMENTS, np.float32)
    optimizer, taken = optimizers.SGD(1e-3), []
    for _ in range(count):
        begun = time.perf_counter()
        variable.read_value()
        time.sleep(compute_s)
        optimizer.apply_gradients([(gradient, variable)])
        taken.append(time.perf_counter() - begun)
    strategy.finish()
    return taken


if __name__ == "__main__":
    main()
