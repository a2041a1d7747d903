"""Time all_reduce and ping-pong: ours, mpi4py alone, and torch's gloo where torch is installed.

    mpidist run -n 2 scripts/bench_group.py [--json results.json]

Every figure is a median, in microseconds a call; the sides take turns in one run. "added" is what
ours costs over mpi4py alone; "ratio" is the peer's time over ours.
"""

import argparse
import os
import tempfile

import numpy as np
from _bench import alternate, report, size_text

import mpidist as dist

SIZES = [8 << (3 * i) for i in range(8)]


def main():
    """Measure on every rank; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    parser.add_argument("--no-gloo", action="store_true")
    args = parser.parse_args()
    group = dist.init_process_group()
    if group.size() < 2:
        raise SystemExit("start it on 2 ranks or more: mpidist run -n 2 scripts/bench_group.py")
    gloo = None if args.no_gloo else start_gloo(group)
    for title, sides_of in (("all_reduce", all_reduce_sides), ("ping-pong", ping_pong_sides)):
        rows = [
            measure(group, sides_of(group, nbytes, gloo), nbytes, args.rounds)
            for nbytes in SIZES
            if nbytes <= args.largest
        ]
        if group.rank() == 0:
            path = args.json and args.json.replace(".json", f"-{title}.json")
            columns = ["size", "mpidist us", "mpi4py us", "added us", "of mpi4py's rate"]
            columns += ["gloo us", "gloo ratio"]
            report(f"{title}, {group.size()} ranks", columns, rows, {"ranks": group.size()}, path)


def start_gloo(group):
    """torch.distributed over gloo beside our own group, or None."""
    try:
        import torch.distributed as torch_dist
    except ImportError:
        return None
    name = np.zeros(256, np.uint8)
    if group.rank() == 0:
        folder = tempfile.mkdtemp()
        path = f"{folder}/store".encode()
        name[: len(path)] = list(path)
    group.broadcast(name)
    path = bytes(name).rstrip(b"\0").decode()
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank(), world_size=group.size()
    )
    group.barrier()
    if group.rank() == 0 and os.path.exists(path):
        os.unlink(path)
    return torch_dist


def all_reduce_sides(group, nbytes, gloo):
    """All-reduce of float32 in place."""
    from mpi4py import MPI

    array = np.zeros(nbytes // 4, np.float32)
    comm = MPI.COMM_WORLD
    sides = {
        "mpidist": lambda: dist.all_reduce(array),
        "mpi4py": lambda: comm.Allreduce(MPI.IN_PLACE, array),
    }
    if gloo is not None:
        import torch

        tensor = torch.zeros(nbytes // 4)
        sides["gloo"] = lambda: gloo.all_reduce(tensor)
    return sides


def ping_pong_sides(group, nbytes, gloo):
    """There and back between ranks 0 and 1; the others wait at the next barrier."""
    from mpi4py import MPI

    array = np.zeros(nbytes // 4, np.float32)
    comm, rank = MPI.COMM_WORLD, group.rank()
    if rank > 1:
        return dict.fromkeys(("mpidist", "mpi4py", *(("gloo",) if gloo else ())), lambda: None)
    other = 1 - rank

    def turns(send, recv):
        def ping():
            send()
            recv()

        def pong():
            recv()
            send()

        return ping if rank == 0 else pong

    sides = {
        "mpidist": turns(lambda: dist.send(array, other), lambda: dist.recv(array, other)),
        "mpi4py": turns(lambda: comm.Send(array, other), lambda: comm.Recv(array, other)),
    }
    if gloo is not None:
        import torch

        tensor = torch.zeros(nbytes // 4)
        sides["gloo"] = turns(lambda: gloo.send(tensor, other), lambda: gloo.recv(tensor, other))
    return sides


def measure(group, sides, nbytes, rounds):
    """One row of the table; all ranks must make the same number of calls."""
    counts = {name: calls_of(group, name, nbytes) for name in sides}
    repeated = {name: repeat(function, counts[name]) for name, function in sides.items()}
    times = alternate(repeated, rounds, 0.0, before=group.barrier)
    us = {name: 1e6 * times[name] / counts[name] for name in times}
    ours, raw, gloo = us["mpidist"], us["mpi4py"], us.get("gloo")
    ratio = None if gloo is None else gloo / ours
    return [size_text(nbytes), ours, raw, ours - raw, raw / ours, gloo, ratio]


def calls_of(group, name, nbytes):
    """Calls of one turn: fixed, since ranks that counted for themselves would not agree."""
    per_turn = max(4, min(1000, (8 << 20) // nbytes))
    return max(2, per_turn // 20) if name == "gloo" else per_turn


def repeat(function, count):
    """A function that calls another so many times."""

    def repeated():
        for _ in range(count):
            function()

    return repeated


if __name__ == "__main__":
    main()
