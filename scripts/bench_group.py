"""Time process groups: mpidist, plain mpi4py, and torch's gloo if torch is installed.

    mpidist run -n 2 scripts/bench_group.py [--only all_reduce,gather] [--json results.json]
        [--plot results.png]

Every time is a median, in microseconds a call. The sides take turns in one run. "added" is the time
of mpidist minus the time of plain mpi4py. "of mpi4py's rate" is the time of mpi4py over the time of
mpidist. "gloo ratio" is the time of gloo over the time of mpidist.
"""

import argparse
import os
import tempfile

import numpy as np
from _bench import alternate, repeat, report, size_text
from _group_sides import NAMES, WITHOUT_SIZE, sides_of

import mpidist as dist

SIZES = [8 << (3 * i) for i in range(8)]
COLUMNS = [
    "size", "mpidist us", "mpi4py us", "added us", "of mpi4py's rate", "gloo us", "gloo ratio",
]  # fmt: skip


def main():
    """Measure on all ranks and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to, one an operation")
    parser.add_argument("--plot", help="PNG file to draw the figures into")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--only", help="operations, comma-separated; by default all")
    parser.add_argument("--no-gloo", action="store_true")
    args = parser.parse_args()
    group = dist.init_process_group()
    if group.size() < 2:
        raise SystemExit("start it on 2 ranks or more: mpidist run -n 2 scripts/bench_group.py")
    gloo = None if args.no_gloo else start_gloo(group)
    tables = {}
    for name in args.only.split(",") if args.only else NAMES:
        sizes = SIZES[:1] if name in WITHOUT_SIZE else [n for n in SIZES if n <= args.largest]
        tables[name] = [
            measure(group, sides_of(name, group, nbytes, gloo), nbytes, args.rounds)
            for nbytes in sizes
        ]
        if group.rank() == 0:
            path = args.json and args.json.replace(".json", f"-{name.replace(' ', '-')}.json")
            title = f"{name}, {group.size()} ranks"
            report(title, COLUMNS, tables[name], {"ranks": group.size()}, path)
    if group.rank() == 0 and args.plot:
        draw(tables, f"mpidist against mpi4py, {group.size()} ranks", args.plot)


def draw(tables, title, path):
    """Draw the results.

    One panel shows the time added to mpi4py at the smallest size. The other panel shows the rate
    over all sizes, as a share of mpi4py's rate.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (added, rate) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    names = list(tables)
    added.barh(names, [rows[0][3] for rows in tables.values()])
    added.invert_yaxis()
    added.set_xlabel("added to mpi4py at the smallest size, in microseconds a call")
    for name, rows in tables.items():
        if len(rows) > 1:
            rate.plot([row[0] for row in rows], [row[4] for row in rows], marker="o", label=name)
    rate.axhline(1, color="gray", linewidth=0.8)
    rate.set_ylim(0, 1.5)
    rate.set_ylabel("rate, of mpi4py's")
    rate.tick_params("x", rotation=30)
    rate.legend(fontsize="x-small", ncols=2)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def start_gloo(group):
    """Start torch.distributed with gloo. Return None if torch is not installed."""
    try:
        import torch.distributed as torch_dist
    except ImportError:
        return None
    name = np.zeros(256, np.uint8)
    if group.rank() == 0:
        folder = tempfile.mkdtemp()
        path = f"{folder}/store".encode()
        name[: len(path)] = list(path)
    group.broadcast(name, 0)
    path = bytes(name).rstrip(b"\0").decode()
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank(), world_size=group.size()
    )
    group.barrier()
    if group.rank() == 0 and os.path.exists(path):
        os.unlink(path)
    return torch_dist


def measure(group, sides, nbytes, rounds):
    """Return a row of the table.

    All ranks make the same number of calls.
    """
    counts = {name: calls_of(group, name, nbytes) for name in sides}
    repeated = {name: repeat(function, counts[name]) for name, function in sides.items()}
    times = alternate(repeated, rounds, 0.0, before=group.barrier, warm=sides)
    us = {name: 1e6 * times[name] / counts[name] for name in times}
    ours, raw, gloo = us["mpidist"], us["mpi4py"], us.get("gloo")
    ratio = None if gloo is None else gloo / ours
    return [size_text(nbytes), ours, raw, ours - raw, raw / ours, gloo, ratio]


def calls_of(group, name, nbytes):
    """Return the number of calls in a turn.

    The number depends only on the size and the side, so that all ranks agree.
    """
    per_turn = max(16, min(1000, (32 << 20) // nbytes))
    return max(2, per_turn // 20) if name == "gloo" else per_turn


if __name__ == "__main__":
    main()
