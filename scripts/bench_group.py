"""Time process groups: ours, mpi4py alone, and torch's gloo where torch is installed.

    mpidist run -n 2 scripts/bench_group.py [--only all_reduce,gather] [--json results.json]

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
    parser.add_argument("--only", help="operations, comma-separated; by default all")
    parser.add_argument("--no-gloo", action="store_true")
    args = parser.parse_args()
    group = dist.init_process_group()
    if group.size() < 2:
        raise SystemExit("start it on 2 ranks or more: mpidist run -n 2 scripts/bench_group.py")
    gloo = None if args.no_gloo else start_gloo(group)
    operations = {"all_reduce": all_reduce_sides, "ping-pong": ping_pong_sides}
    operations |= {name: collective_sides(name) for name in COLLECTIVES}
    only = args.only.split(",") if args.only else list(operations)
    for title, sides_of in ((name, operations[name]) for name in only):
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


class Memory:
    """What the other collectives work on: float32, one part a rank.

    Attributes:
        part: Of ``nbytes``.
        whole: As many parts as there are ranks.
        rows: The same, as a list; on the root, and None elsewhere.
    """

    def __init__(self, group, nbytes, zeros):
        count = nbytes // 4
        self.part, self.whole = zeros(count), zeros(group.size() * count)
        self.split = [self.whole[n * count : (n + 1) * count] for n in range(group.size())]
        self.rows = self.split if group.rank() == 0 else None
        self.target = zeros(count)
        self.other = zeros(group.size() * count)


# By name: the call of torch.distributed's name, ours and gloo's alike, and mpi4py's.
COLLECTIVES = {
    "broadcast": (
        lambda d, m: d.broadcast(m.part, 0),
        lambda comm, m, mpi: comm.Bcast(m.part, 0),
    ),
    "reduce": (
        lambda d, m: d.reduce(m.part, 0),
        lambda comm, m, mpi: comm.Reduce(
            mpi.IN_PLACE if comm.rank == 0 else m.part, m.part if comm.rank == 0 else None, root=0
        ),
    ),
    "all_gather": (
        lambda d, m: d.all_gather(m.split, m.part),
        lambda comm, m, mpi: comm.Allgather(m.part, m.whole),
    ),
    "all_gather_into_tensor": (
        lambda d, m: d.all_gather_into_tensor(m.whole, m.part),
        lambda comm, m, mpi: comm.Allgather(m.part, m.whole),
    ),
    "gather": (
        lambda d, m: d.gather(m.part, m.rows, 0),
        lambda comm, m, mpi: comm.Gather(m.part, m.whole if comm.rank == 0 else None, 0),
    ),
    "scatter": (
        lambda d, m: d.scatter(m.part, m.rows, 0),
        lambda comm, m, mpi: comm.Scatter(m.whole if comm.rank == 0 else None, m.part, 0),
    ),
    "reduce_scatter_tensor": (
        lambda d, m: d.reduce_scatter_tensor(m.target, m.whole),
        lambda comm, m, mpi: comm.Reduce_scatter_block(m.whole, m.target),
    ),
    "all_to_all_single": (
        lambda d, m: d.all_to_all_single(m.other, m.whole),
        lambda comm, m, mpi: comm.Alltoall(m.whole, m.other),
    ),
    "all_gather_object": (
        lambda d, m: d.all_gather_object([None] * d.get_world_size(), {"a": 1, "bytes": 8}),
        lambda comm, m, mpi: comm.allgather({"a": 1, "bytes": 8}),
    ),
}


def collective_sides(name):
    """The sides of one of the collectives."""

    def sides_of(group, nbytes, gloo):
        from mpi4py import MPI

        call, raw = COLLECTIVES[name]
        ours = Memory(group, nbytes, lambda count: np.zeros(count, np.float32))
        sides = {
            "mpidist": lambda: call(dist, ours),
            "mpi4py": lambda: raw(MPI.COMM_WORLD, ours, MPI),
        }
        if gloo is not None:
            import torch

            theirs = Memory(group, nbytes, torch.zeros)
            sides["gloo"] = lambda: call(gloo, theirs)
        return sides

    return sides_of


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
