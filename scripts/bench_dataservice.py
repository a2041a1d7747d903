"""Time the data service against memcpy, TensorFlow's service, torch's DataLoader and Grain.

    mpidist run --worker 1 --data 1 scripts/bench_dataservice.py [--only batches,small]
        [--json results.json]
    python scripts/bench_dataservice.py    # without the service over mpi

One process makes the elements and another process reads them. "mpi" is the job data of this world.
"tcp" is a dispatcher and a worker in plain processes of this host, which share memory. "sockets" is
the same without shared memory, as between hosts. Times and rates are medians, and the sides take
turns in one run. Figures of memory are peaks of one epoch. The benchmark includes the peers that
are installed.
"""

import argparse
import json
import pickle
import statistics
from functools import partial

import numpy as np
from _bench import alternate, report
from _data_contents import CONTENTS, SLEEP_S, nap
from _data_processes import Child, Service, memory_of
from _data_sides import (
    TensorFlow,
    Turn,
    ending,
    grain_stream,
    memcpy,
    our_stream,
    take_turns,
    taker,
    torch_stream,
    whole,
)

import mpidist
from dataservice import Dataset, distribute
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.errors import UnimplementedError

COMPRESSIONS = {"": "AUTO", ", uncompressed": None}
# Elements of a turn, which takes some tenths of a second.
COUNTS = {
    "batches": {"ours": 150, "memcpy": 150, "tensorflow": 12, "torch": 40, "grain": 20},
    "images": {"ours": 60, "memcpy": 150, "tensorflow": 12, "torch": 12, "grain": 12},
    "small": {"ours": 50_000, "tensorflow": 800, "torch": 800, "grain": 800},
}
POSITIONS = [100, 10_000, 1_000_000]
WORKERS = [1, 2, 4, 8]
LENGTHS = [256, 4096]


def main():
    """Run the data task, or measure on the first worker or the only process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file to write the figures to, one a part")
    parser.add_argument("--only", help=f"of {','.join(PARTS)}; by default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="tensorflow,torch,grain", help="where installed")
    args = parser.parse_args()
    parts = args.only.split(",") if args.only else list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not mpidist.launched():
        measure(parts, args, {})
        return
    resolver = MPIClusterResolver(jobs={"data": 1, "worker": -1})
    with mpidist.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ) as server:
        if resolver.task_type == "data":
            server.join()
        elif resolver.task_id == 0:
            measure(parts, args, {"mpi": resolver.master("data", 0)})


def measure(parts, args, targets):
    """Run the parts, and report each part as soon as it is done."""
    services = {"tcp": Service(), "sockets": Service(sockets=True)}
    targets = targets | {name: service.target for name, service in services.items()}
    peers = args.peers.split(",")
    tensorflow = TensorFlow.start() if "tensorflow" in peers else None
    bench = Bench(targets, tensorflow, peers, args.rounds)
    try:
        for part in parts:
            title, columns, rows = PARTS[part](bench)
            path = args.json and args.json.replace(".json", f"-{part}.json")
            report(title, columns, rows, {"rounds": args.rounds}, path)
    finally:
        for each in (*services.values(), *([tensorflow] if tensorflow else [])):
            each.stop()


class Bench:
    """The parts of the benchmark. Each part returns a title, columns and rows.

    Args:
        targets: Addresses of our services, by name.
        tensorflow: TensorFlow's service, or None.
        peers: Names of the peers to include.
        rounds: Number of turns of each side.
    """

    def __init__(self, targets, tensorflow, peers, rounds):
        self.targets = targets
        self.tensorflow = tensorflow
        self.peers = peers
        self.rounds = rounds

    def elements(self, part):
        """Measure the rate in the middle of an epoch."""
        content, counts = CONTENTS[part], COUNTS[part]
        turns = {
            name: our_stream(content, target, "parallel_epochs", counts["ours"])
            for name, target in self.targets.items()
        }
        name, target = next(iter(self.targets.items()))
        shared_out = our_stream(content, target, "distributed_epoch", counts["ours"])
        turns[f"{name}, distributed_epoch"] = shared_out
        if "memcpy" in counts:
            turns |= memcpy(counts["memcpy"])
        if self.tensorflow is not None:
            for suffix, compression in COMPRESSIONS.items():
                turn = self.tensorflow.stream(content, counts["tensorflow"], compression)
                turns["tensorflow" + suffix] = turn
        for name, make in (("torch", torch_stream), ("grain", grain_stream)):
            turn = make(content, counts[name]) if name in self.peers else None
            if turn is not None:
                turns[name] = turn
        times = {
            name: seconds / counts.get(name.partition(",")[0], counts["ours"])
            for name, seconds in take_turns(turns, self.rounds).items()
        }
        copy = times.get("memcpy")
        peer = min((s for name, s in times.items() if "tensorflow" in name), default=None)
        rows = [
            [name, 1e6 * s, 1e-6 * content.nbytes / s, copy and copy / s, peer and peer / s]
            for name, s in times.items()
        ]
        columns = ["side", "us an element", "MB/s", "of memcpy", "of tensorflow's best"]
        return content.title, columns, rows

    def ends(self):
        """Measure the time of an epoch apart from its elements."""
        makers = {name: partial(epoch_of, target) for name, target in self.targets.items()}
        if self.tensorflow is not None:
            makers["tensorflow"] = lambda count: self.tensorflow.range(count)
        turns = {name: ending(make(100)) for name, make in makers.items()}
        turns |= {name + ", empty": whole(make(0)) for name, make in makers.items()}
        ms = {name: 1e3 * s for name, s in take_turns(turns, self.rounds).items()}
        rows = [[name, ms[name], ms[name + ", empty"]] for name in makers]
        columns = ["side", "ms after the last element", "ms an empty epoch"]
        return "end of an epoch", columns, rows

    def naps(self):
        """Measure the rate of several workers with a map that sleeps."""
        service, rows, count = Service(workers=0), [], 40
        columns = ["workers", "elements/s", "of n sleepers", "whole epoch s", "of n sleepers"]
        for workers in WORKERS:
            service.grow(workers)
            apply = distribute("distributed_epoch", service.target)
            endless = Dataset.range(1 << 20).map(nap).apply(apply)
            epoch = Dataset.range(count * workers).map(nap).apply(apply)
            turns = {
                # A late start: all workers have begun, and the prefetched elements are used up.
                "middle": Turn(partial(iter, endless), taker(count * workers), taker(8 * workers)),
                "epoch": whole(partial(iter, epoch)),
                "alone": Turn(lambda: None, lambda _: [nap(i) for i in range(count)]),
            }
            times = take_turns(turns, self.rounds)
            rows.append(
                [
                    str(workers),
                    count * workers / times["middle"],
                    times["alone"] / times["middle"],
                    times["epoch"],
                    times["alone"] / times["epoch"],
                ]
            )
        service.stop()
        return f"a map that sleeps {1e3 * SLEEP_S:g} ms", columns, rows

    def memory(self):
        """Measure the memory growth of a slow consumer and a fast worker."""
        columns = ["elements of 1 MiB", "worker MiB", "shared", "consumer MiB", "shared"]
        rows = []
        for sockets in (False, True):
            for length in LENGTHS:
                service = Service(sockets=sockets)
                growth = growth_of(service, length)
                service.stop()
                rows.append([f"{'sockets' if sockets else 'tcp'}, {length}", *growth])
        return "memory at most, while the consumer is slow", columns, rows

    def states(self):
        """Measure the time to save a position and to continue from it."""
        service = distribute("distributed_epoch", self.targets["tcp"], deterministic=True)
        datasets = {
            "local": Dataset.range(1 << 24).map(int),
            "local, shuffled": Dataset.range(1 << 24).shuffle(1000, seed=1),
            "tcp": Dataset.range(1 << 24).apply(service),
            "tcp, shuffled": Dataset.range(1 << 24).shuffle(1000, seed=1).apply(service),
        }
        rows = []
        for name, dataset in datasets.items():
            try:
                rows += [self.state_at(name, dataset, position) for position in POSITIONS]
            except UnimplementedError as error:
                print(f"states of {name} are left out: {error}")
        columns = ["dataset, position", "state bytes", "get_state us", "ms to the next element"]
        return "putting a position away, and going on", columns, rows

    def state_at(self, name, dataset, position):
        """Return the row of a dataset at a position."""
        with iter(dataset) as elements:
            taker(position)(elements)
            state = elements.get_state()
            times = alternate({"put away": elements.get_state}, self.rounds, 0.0)

        def go_on(elements):
            elements.set_state(state)
            next(elements)

        times |= take_turns({"next": Turn(partial(iter, dataset), go_on)}, self.rounds)
        nbytes = len(state if isinstance(state, bytes) else pickle.dumps(state))
        return [f"{name}, {position:,}", nbytes, 1e6 * times["put away"], 1e3 * times["next"]]

    def shared(self):
        """Measure the rate of consumers that share a job with one worker."""
        columns = ["content", "1 consumer, elements/s", "4 consumers", "of 1"]
        rows = []
        for content, count in (("batches", 200), ("small", 100_000)):
            service = Service()
            groups = {
                size: [
                    Child("consumer", service.target, f"{content}:{count}", f"{content} {size}")
                    for _ in range(size)
                ]
                for size in (1, 4)
            }
            rates = {size: [] for size in groups}
            for number in range(self.rounds):
                for size in (1, 4) if number % 2 else (4, 1):
                    rates[size].append(rate_of(groups[size]))
            one, four = (statistics.median(rates[size]) for size in (1, 4))
            rows.append([CONTENTS[content].title, one, four, four / one])
            for child in (*groups[1], *groups[4]):
                child.stop()
            service.stop()
        return "consumers of one job name over tcp", columns, rows


def epoch_of(target, count):
    """Return a function that starts an epoch of ``count`` elements."""
    return partial(iter, Dataset.range(count).apply(distribute("distributed_epoch", target)))


def growth_of(service, length):
    """Return the memory growth of the worker and of a slow consumer.

    The figures are peaks during the epoch, in the form of ``memory_of``.
    """
    consumer = Child("consumer", service.target, f"fresh:{length}", f"slow {length}")
    pids = [service.workers[0].pid, consumer.pid]
    before = np.array([memory_of(pid) for pid in pids])
    consumer.say(json.dumps({"most": 100, "pause_s": 0.005, "first_pause_s": 1.0}))
    peak = before
    while consumer.is_busy(0.02):
        peak = np.maximum(peak, [memory_of(pid) for pid in pids])
    consumer.stop()
    return (peak - before).flatten().tolist()


def rate_of(consumers):
    """Return the elements a second of consumers that start an epoch together."""
    for child in consumers:
        child.say("{}")
    said = [json.loads(child.hear()) for child in consumers]
    took_part = [each for each in said if each["count"]]
    first = min(each["first"] for each in took_part)
    last = max(each["last"] for each in took_part)
    return sum(each["count"] for each in took_part) / (last - first)


PARTS = {
    **{part: partial(Bench.elements, part=part) for part in CONTENTS},
    "ends": Bench.ends,
    "naps": Bench.naps,
    "memory": Bench.memory,
    "states": Bench.states,
    "shared": Bench.shared,
}

if __name__ == "__main__":
    main()
