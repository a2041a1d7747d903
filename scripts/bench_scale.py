"""Time n workers that pull from and push to k servers at once, against the bound of memory.

    mpidist run --ps 2 --worker 2 scripts/bench_scale.py --ps 2 [--json results.json]

Every worker moves M bytes of variables, which are divided over all servers. A figure is the median
time of the slowest worker, in milliseconds. Let B be the rate at which each worker copies memory
while all workers copy. A worker copies M bytes, and a server receives n/k times M bytes, so no
transport is faster than max(M/B, nM/(kB)). "of bound" is this bound over our time. Pulls through
shared memory need no server, so their bound is M/B.
"""

import argparse
import time

import numpy as np
from _bench import report, size_text

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

SIZES = [1 << 20, 16 << 20, 64 << 20]


def main():
    """Run a ps or a worker."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ps", type=int, default=1, help="servers; as mpidist run was told")
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--transport", default="auto", choices=("auto", "shared", "rma", "p2p"))
    parser.add_argument("--nan", default="error", choices=("error", "pass"), help="look for NaN")
    args = parser.parse_args()
    resolver = MPIClusterResolver(jobs={"ps": args.ps, "worker": -1})
    spec = resolver.cluster_spec()
    with mpidist.Server(spec, resolver.task_type, resolver.task_id) as server:
        if resolver.task_type == "ps":
            server.join()
        else:
            compare(args, server.job_group("worker"), spec.num_tasks("ps"))


def compare(args, workers, servers):
    """Measure on all workers and report on the first worker."""
    strategy = ParameterServerStrategy(transport=args.transport, nan=args.nan)
    rows = []
    for nbytes in [size for size in SIZES if size <= args.largest]:
        sides = sides_of(strategy, nbytes, servers)
        taken = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, side in sides.items():
                taken[name].append(slowest(side, workers))
        ms = {name: 1e3 * float(np.median(times)) for name, times in taken.items()}
        copied = ms["memcpy"]
        on_node = args.transport in ("auto", "shared")
        share = max(1.0, workers.size() / servers)
        bounds = {"pull": copied * (1 if on_node else share), "push": copied * share}
        rows += [[f"{size_text(nbytes)}, {name}", ms[name], copied, bound / ms[name]]
                 for name, bound in bounds.items()]  # fmt: skip
    if workers.rank() == 0:
        title = f"{workers.size()} workers, {servers} servers"
        facts = {"workers": workers.size(), "servers": servers, "transport": args.transport}
        columns = ["of a worker", "mpidist ms", "memcpy ms", "of bound"]
        report(title, columns, rows, facts, args.json)


def sides_of(strategy, nbytes, servers):
    """Return the functions that all workers call at once, by name."""
    count = nbytes // servers // 4
    with strategy.scope():
        variables = [
            get_variable(f"v{nbytes}-{n}", count, initializer="zeros") for n in range(servers)
        ]
    values = [np.ones(count, np.float32) for _ in variables]
    gradients = [np.ones(count, np.float32) for _ in variables]
    optimizer = optimizers.SGD(1e-3)

    def pull():
        for variable, value in zip(variables, values, strict=True):
            variable.read_value(value)

    def push():
        optimizer.apply_gradients(zip(gradients, variables, strict=True)).wait()

    def copy():
        for value, gradient in zip(values, gradients, strict=True):
            np.copyto(value, gradient)

    return {"pull": pull, "push": push, "memcpy": copy}


def slowest(side, workers):
    """Return the seconds of the slowest worker."""
    side()
    workers.barrier()
    begun = time.perf_counter()
    side()
    taken = np.array([time.perf_counter() - begun])
    workers.all_reduce(taken, "max")
    return taken[0]


if __name__ == "__main__":
    main()
