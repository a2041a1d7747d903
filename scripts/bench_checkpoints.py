"""Time saves of checkpoints that stop the training, and saves beside the training.

    mpidist run --ps 1 --worker 1 scripts/bench_checkpoints.py [--mib 64] [--json results.json]

The variables and their momentum slots have the given size together. A step computes, and pushes to
one small variable, or to all large ones. "step" is its time. "save" is the time of
``strategy.save``. "held up" is the time of ``checkpoints.save()`` and of the next step, less the
time of a step alone. "all steps" is the same for all steps until the checkpoint is complete: the
writing takes a share of the cores. Times are medians in milliseconds. "share" is "held up" over
"save", in percent. Saves and checkpoints take turns.
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial

import numpy as np
from _bench import report

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import ParameterServerStrategy, get_variable, optimizers

VARIABLES = 16
REPEATS = (1, 10, 30)  # of the computation in a step: 2, 20 and 60 ms
LIMIT_S = 60.0  # for a checkpoint
COLUMNS = ["variables", "step", "save", "held up", "all steps", "share"]


def main():
    """Run the ps, or measure on the worker."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="where the checkpoints are; by default a temporary folder")
    args = parser.parse_args()
    resolver = MPIClusterResolver(jobs={"ps": 1, "worker": -1})
    with mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        if resolver.task_type == "ps":
            server.join()
        elif resolver.task_id == 0:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                rows = measure(args, folder)
            report(
                f"checkpoints of {args.mib:g} MiB, ms",
                COLUMNS,
                rows,
                {"variables": VARIABLES},
                args.json,
            )


def measure(args, folder):
    """Return the rows of the table, one for each length of a step."""
    strategy = ParameterServerStrategy()
    size = int(args.mib * (1 << 20) / 4 / 2 / VARIABLES)
    with strategy.scope():
        small = get_variable("small", 1024, initializer="zeros")
        large = [get_variable(f"v{n}", size, initializer="random_normal") for n in range(VARIABLES)]
    momentum, sgd = optimizers.SGD(1e-3, momentum=0.9), optimizers.SGD(1e-3)
    gradients = [(np.ones(size, np.float32), one) for one in large]
    momentum.apply_gradients(gradients).wait()
    matrix, gradient = np.ones((300, 300)), np.ones(1024, np.float32)
    checkpoints = strategy.checkpoints(os.path.join(folder, "beside"))
    stopped = os.path.join(folder, "stopped")

    def take_step(repeats, optimizer, pushed):
        for _ in range(repeats):
            matrix @ matrix @ matrix
        optimizer.apply_gradients(pushed).wait()

    one = [(gradient, small)]
    steps = [("small", partial(take_step, number, sgd, one)) for number in REPEATS]
    steps.append(("large", partial(take_step, REPEATS[1], momentum, gradients)))
    rows = []
    for changed, step in steps:
        times = {"step": [], "save": [], "held up": [], "all steps": []}
        for _ in range(args.rounds + 1):
            times["save"].append(timed(strategy.save, stopped))
            alone = statistics.median(timed(step) for _ in range(20))
            last, begun = checkpoints.path, time.perf_counter()
            checkpoints.save()
            step()
            times["step"].append(alone)
            times["held up"].append(time.perf_counter() - begun - alone)
            taken = 1
            while checkpoints.path == last:
                if time.perf_counter() - begun > LIMIT_S:
                    raise SystemExit("the checkpoint is not complete: is there room on the disk?")
                step()
                taken += 1
            times["all steps"].append(time.perf_counter() - begun - taken * alone)
        # The first round is left out: its copy causes page faults.
        ms = {name: 1e3 * statistics.median(found[1:]) for name, found in times.items()}
        rows.append([changed, *ms.values(), 100 * ms["held up"] / ms["save"]])
    return rows


def timed(call, *arguments):
    """Return the time of a call in seconds."""
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


main()
