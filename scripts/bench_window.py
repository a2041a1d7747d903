"""Time windows of each kind against memcpy, and a consistent pull during pushes of other workers.

    mpidist run -n 6 scripts/bench_window.py [--json results.json]

Rank 0 reads and writes the part of rank 1, which sleeps. The figures of windows are medians, in
microseconds a call, and the sides take turns in one run. "of copy" is the time of a copy inside the
process over ours. "of sum" is the time of an addition inside the process over ours.

Then rank 0 is a ps, rank 1 is a worker that pulls a variable, and the other ranks are workers that
push to the variable without pause. These figures are in milliseconds. "push ms" is the mean time
between two versions of the variable during the pulls.
"""

import argparse
import statistics
import time

import numpy as np
from _bench import alternate, report, size_text

import mpidist
from mpidist import Window
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.mpi import world
from strategy import ParameterServerStrategy, get_variable, optimizers

SIZES = [8, 512, 32 << 10, 1 << 20, 4 << 20, 16 << 20]
KINDS = {"shared": Window.shared, "rma": Window.rma}


def main():
    """Measure the windows, then the pulls."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--pulls", type=int, default=40)
    args = parser.parse_args()
    comm = world().comm
    if comm.size < 3:
        raise SystemExit("start it on 3 ranks or more: mpidist run -n 6 scripts/bench_window.py")
    for kind, make in KINDS.items():
        window = make(comm, args.largest)
        if comm.rank == 0:
            compare(kind, window, args)
        sleep_until_all_are_here(comm)
        window.free()
    pull_under_updates(args)


def sleep_until_all_are_here(comm):
    """Wait for all ranks, and sleep meanwhile to leave the cores to the measurement."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def path_of(args, part):
    """Return the path of the JSON file of a part, or None."""
    return args.json and args.json.replace(".json", f"-{part}.json")


def compare(kind, window, args):
    """Measure and report the table of a kind of window."""
    rows = []
    for nbytes in [size for size in SIZES if size <= args.largest]:
        data, out = np.ones(nbytes // 8), np.empty(nbytes // 8)
        sides = {
            "copy": lambda out=out, data=data: np.copyto(out, data),
            "get": lambda out=out: window.get(1, 0, out),
            "put": lambda data=data: window.put(1, 0, data),
            "sum": lambda out=out, data=data: np.add(out, data, out=out),
            "add": lambda data=data: window.add(1, 0, data),
        }
        us = {k: 1e6 * s for k, s in alternate(sides, args.rounds, 0.02).items()}
        row = [size_text(nbytes)]
        for raw, calls in (("copy", ("get", "put")), ("sum", ("add",))):
            row.append(us[raw])
            for call in calls:
                row += [us[call], us[raw] / us[call]]
        rows.append(row)
    window.put(1, 0, np.zeros(1, np.int64))
    count = {"fetch_add": lambda: window.fetch_add(1, 0, 1)}
    us = 1e6 * alternate(count, args.rounds, 0.02)["fetch_add"]
    columns = ["size", "copy us", "get us", "of copy", "put us", "of copy"]
    columns += ["sum us", "add us", "of sum"]
    title = f"{kind} window (fetch_add: {us:.2f} us)"
    report(title, columns, rows, {"fetch_add_us": us}, path_of(args, kind))


def pull_under_updates(args):
    """Measure pulls alone and during pushes of other workers."""
    resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
    job, index = resolver.task_type, resolver.task_id
    with mpidist.Server(resolver.cluster_spec(), job, index) as server:
        if job == "ps":
            server.join()
            return
        strategy = ParameterServerStrategy()
        with strategy.scope():
            variable = get_variable("v", args.largest // 4, initializer="zeros")
        server.job_group("worker").barrier()
        if index:
            push_until_told(variable)
        else:
            measure(variable, args)


def push_until_told(variable):
    """Push without pause, from the first message of the reader until the second."""
    comm = world().comm
    gradient, sgd = np.ones(variable.shape, variable.dtype), optimizers.SGD(1e-3)
    while not comm.Iprobe(source=1):
        time.sleep(0.01)
    comm.recv(source=1)
    while not comm.Iprobe(source=1):
        sgd.apply_gradients([(gradient, variable)])
    comm.recv(source=1)


def measure(variable, args):
    """Start the pushers, measure pulls, stop the pushers, and report."""
    comm = world().comm
    out = np.empty(variable.shape, variable.dtype)
    gradient, sgd = np.ones(variable.shape, variable.dtype), optimizers.SGD(1e-3)
    sides = {
        "pull": lambda: variable.read_value(out),
        "push": lambda: sgd.apply_gradients([(gradient, variable)]).wait(),
    }
    alone = alternate(sides, args.rounds, 0.02)
    pushers = range(2, comm.size)
    for rank in pushers:
        comm.send("begin", rank)
    time.sleep(0.2)
    variable.read_value(out)
    first, begin, pulls = variable.version, time.perf_counter(), []
    for _ in range(args.pulls):
        started = time.perf_counter()
        variable.read_value(out)
        pulls.append(time.perf_counter() - started)
    push = (time.perf_counter() - begin) / max(variable.version - first, 1)
    for rank in pushers:
        comm.send("end", rank)
    median, longest = statistics.median(pulls), max(pulls)
    row = [
        size_text(args.largest),
        1e3 * alone["pull"], 1e3 * alone["push"],
        1e3 * push, 1e3 * median, median / push, 1e3 * longest, longest / push,
    ]  # fmt: skip
    columns = ["size", "pull alone ms", "push alone ms", "push ms"]
    columns += ["pull ms", "in pushes", "longest ms", "in pushes"]
    title = f"pull while {len(pushers)} workers push without pause"
    report(title, columns, [row], {"pulls": pulls}, path_of(args, "pull"))


if __name__ == "__main__":
    main()
