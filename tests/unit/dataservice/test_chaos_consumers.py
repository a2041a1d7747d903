"""Killed consumers of a shared epoch, together with killed workers and dispatchers.

A seed determines the schedule of the accidents. One consumer survives all of them.
"""

import random
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
from _cases.data_cluster import DataCluster, Reader

from dataservice import Dataset, distribute

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it

LIMIT_S = 60.0
SAMPLE = range(2)
MANY = [pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 62)]


def use(state, path, seconds, until):
    """Append elements to a file. After the first element, wait for the file ``until``, if any."""
    with path.open("a", buffering=1) as lines:
        for element in state["elements"]:
            lines.write(f"{element}\n")
            while until is not None and not until.exists():
                time.sleep(0.01)
            time.sleep(seconds)


class Consumers:
    """The consumers of one job, and the elements that they have used."""

    def __init__(self, cluster, dataset, count, folder):
        self.done = folder / "done"
        self._paths = [folder / f"{number}.used" for number in range(count)]
        self._readers = [
            Reader(cluster.add_process(f"consumer{number}"), dataset) for number in range(count)
        ]

    def begin(self, rng):
        """Start all consumers. The first one waits for the end of the accidents."""
        for number, (reader, path) in enumerate(zip(self._readers, self._paths, strict=True)):
            path.touch()
            pace_s = rng.choice([0.0, 0.5e-3, 2e-3])
            reader.process.begin(use, path, pace_s, None if number else self.done)

    def kill(self, number):
        self._readers[number].process.end()

    def finish(self, numbers):
        self.done.touch()
        for number in numbers:
            self._readers[number].process.result(LIMIT_S)

    def used(self, numbers):
        lines = [Path(self._paths[number]).read_text().split() for number in numbers]
        return [int(line) for each in lines for line in each]


@pytest.mark.parametrize("seed", [*SAMPLE, *MANY])
def test_an_epoch_in_spite_of_consumers_that_die(tmp_path, seed):
    rng = random.Random(seed)
    count, size = rng.choice([2, 3, 4]), rng.choice([100, 500, 2000])
    dead = rng.sample(range(1, count), rng.randrange(1, count))
    acts = [("consumer", number) for number in dead]
    acts += rng.sample([("worker", 0), ("worker", 1), ("dispatcher", 0)], rng.randrange(3))
    rng.shuffle(acts)
    config = {"client_timeout_ms": 300_000}
    journal = tmp_path / "journal"
    with DataCluster(2, work_dir=journal, fault_tolerant=True, dispatcher=config) as cluster:
        apply = distribute("distributed_epoch", cluster.target, job_name="job")
        dataset = Dataset.range(size).map(int).apply(apply)
        consumers = Consumers(cluster, dataset, count, tmp_path)
        consumers.begin(rng)
        for kind, number in acts:
            threading.Event().wait(rng.uniform(0, 0.4))
            befall(cluster, consumers, kind, number)
        alive = sorted(set(range(count)) - set(dead))
        consumers.finish(alive)
        used, lost = consumers.used(alive), consumers.used(dead)
    assert len(used) == len(set(used)), f"{acts}: came twice"
    # Elements that a dead consumer used in its last second, without a report, may come again.
    assert set(used) | set(lost) == set(range(size)), f"{acts}: did not come"


def befall(cluster, consumers, kind, number):
    if kind == "consumer":
        consumers.kill(number)
    elif kind == "worker":
        cluster.kill_worker(number)
        cluster.restart_worker(number, wait=False)
    else:
        cluster.kill_dispatcher()
        cluster.restart_dispatcher(wait=False)
