"""Time torch.distributed with the backend "mpidist" and with gloo.

    mpidist run -n 2 scripts/bench_torch.py [--only all_reduce,barrier] [--largest BYTES]
        [--json results.json] [--plot results.png]

Every time is a median, in microseconds a call. The backends take turns in one run. "mpi4py us" is
plain mpi4py's all_reduce, without torch. "ratio" is the time of gloo over the time of mpidist. The
last table has the time of a training step of a small transformer with DistributedDataParallel.
"""

import argparse
import warnings

import numpy as np
import torch
import torch.distributed as dist
from _bench import alternate, repeat, report, size_text
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import mpidist.torch  # noqa: F401

SIZES = [8 << (3 * i) for i in range(8)] + [64 << 20]
COLUMNS = ["size", "mpidist us", "gloo us", "ratio", "mpi4py us"]
STEP_COLUMNS = ["model", "mpidist ms", "gloo ms", "ratio"]
WITHOUT_SIZE = ("barrier", "all_gather_object")
GLOO_SHARE = 20  # gloo makes fewer calls in a turn


def main():
    """Measure on all ranks, and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to, one an operation")
    parser.add_argument("--plot", help="PNG file to draw the figures into")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--only", help="operations, comma-separated; by default all")
    args = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # torch renames functions
    dist.init_process_group("mpidist")
    if dist.get_world_size() < 2:
        raise SystemExit("start it on 2 ranks or more: mpidist run -n 2 scripts/bench_torch.py")
    groups = {"mpidist": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    comm = MPI.COMM_WORLD.Dup()
    names = args.only.split(",") if args.only else [*CALLS, "step"]
    tables = {}
    for name in names:
        if name == "step":
            continue
        sizes = SIZES[:1] if name in WITHOUT_SIZE else [n for n in SIZES if n <= args.largest]
        tables[name] = [measure(comm, groups, name, nbytes, args.rounds) for nbytes in sizes]
        show(args, name, COLUMNS, tables[name])
    if "step" in names:
        show(args, "step", STEP_COLUMNS, [measure_step(comm, groups, args.rounds)])
    if dist.get_rank() == 0 and args.plot:
        draw(tables, args.plot)
    dist.destroy_process_group()


def show(args, name, columns, rows):
    """Print a table on rank 0, and write it to its file."""
    if dist.get_rank() == 0:
        path = args.json and args.json.replace(".json", f"-{name}.json")
        title = f"torch.distributed {name}, {dist.get_world_size()} ranks"
        report(title, columns, rows, {"ranks": dist.get_world_size()}, path)


def measure(comm, groups, name, nbytes, rounds):
    """Return a row of the table of an operation. All ranks make the same number of calls."""
    sides = {side: CALLS[name](group, nbytes) for side, group in groups.items()}
    if name == "all_reduce":
        array = np.zeros(nbytes // 4, np.float32)
        sides["mpi4py"] = lambda: comm.Allreduce(MPI.IN_PLACE, array)
    count = max(4, min(400, (32 << 20) // nbytes))
    counts = {side: max(2, count // (GLOO_SHARE if side == "gloo" else 1)) for side in sides}
    repeated = {side: repeat(call, counts[side]) for side, call in sides.items()}
    times = alternate(repeated, rounds, 0.0, before=comm.Barrier, warm=sides)
    us = {side: 1e6 * times[side] / counts[side] for side in times}
    label = "" if name in WITHOUT_SIZE else size_text(nbytes)
    return [label, us["mpidist"], us["gloo"], us["gloo"] / us["mpidist"], us.get("mpi4py")]


# Each function returns a call of one operation. The sizes are those of the whole operation.


def _all_reduce(group, nbytes):
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(tensor, group=group)


def _all_reduce_async(group, nbytes):
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(tensor, group=group, async_op=True).wait()


def _broadcast(group, nbytes):
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.broadcast(tensor, 0, group=group)


def _reduce(group, nbytes):
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.reduce(tensor, 0, group=group)


def _parts(group, nbytes):
    """Return a tensor and a list with a tensor for each rank."""
    count = max(1, nbytes // 4 // group.size())
    return torch.zeros(count), [torch.zeros(count) for _ in range(group.size())]


def _all_gather(group, nbytes):
    own, parts = _parts(group, nbytes)
    return lambda: dist.all_gather(parts, own, group=group)


def _all_gather_into_tensor(group, nbytes):
    own, parts = _parts(group, nbytes)
    whole = torch.cat(parts)
    return lambda: dist.all_gather_into_tensor(whole, own, group=group)


def _reduce_scatter_tensor(group, nbytes):
    own, parts = _parts(group, nbytes)
    whole = torch.cat(parts)
    return lambda: dist.reduce_scatter_tensor(own, whole, group=group)


def _gather(group, nbytes):
    own, parts = _parts(group, nbytes)
    outputs = parts if group.rank() == 0 else None
    return lambda: dist.gather(own, outputs, 0, group=group)


def _scatter(group, nbytes):
    own, parts = _parts(group, nbytes)
    inputs = parts if group.rank() == 0 else None
    return lambda: dist.scatter(own, inputs, 0, group=group)


def _all_to_all_single(group, nbytes):
    whole = torch.cat(_parts(group, nbytes)[1])
    output = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(output, whole, group=group)


def _ping_pong(group, nbytes):
    tensor = torch.zeros(nbytes // 4)

    def there_and_back():
        if group.rank() == 0:
            dist.send(tensor, 1, group=group)
            dist.recv(tensor, 1, group=group)
        elif group.rank() == 1:
            dist.recv(tensor, 0, group=group)
            dist.send(tensor, 0, group=group)

    return there_and_back


def _barrier(group, _):
    return lambda: dist.barrier(group)


def _all_gather_object(group, _):
    objects = [None] * group.size()
    return lambda: dist.all_gather_object(objects, {"loss": 0.5}, group=group)


CALLS = {
    function.__name__[1:]: function
    for function in (
        _all_reduce, _all_reduce_async, _broadcast, _reduce, _all_gather, _all_gather_into_tensor,
        _reduce_scatter_tensor, _gather, _scatter, _all_to_all_single, _ping_pong, _barrier,
        _all_gather_object,
    )
}  # fmt: skip


def measure_step(comm, groups, rounds):
    """Return the row of a training step with DistributedDataParallel."""
    torch.set_num_threads(1)
    sides = {side: make_step(group) for side, group in groups.items()}
    times = alternate(sides, rounds, 0.0, before=comm.Barrier)
    ms = {side: 1e3 * time for side, time in times.items()}
    return ["transformer", ms["mpidist"], ms["gloo"], ms["gloo"] / ms["mpidist"]]


def make_step(group):
    """Return a training step of a small transformer: 4 layers, 3.2 million parameters."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    encoder = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = DistributedDataParallel(encoder, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.randn(4, 16, 256)

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def draw(tables, path):
    """Draw how many times faster than gloo each operation is, over the size."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, rows in tables.items():
        axes.plot([row[0] for row in rows], [row[3] for row in rows], marker="o", label=name)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("size")
    axes.set_ylabel("time of gloo over time of mpidist")
    axes.set_title("torch.distributed: mpidist against gloo")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
