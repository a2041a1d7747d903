"""Workers and dispatchers that are killed, restarted and stopped in the middle of an epoch.

A seed determines the schedule of the accidents. A failing test prints the schedule and the steps
that were done. In a fault-tolerant service the dispatcher is killed, too.
"""

import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

import cloudpickle
import pytest
from _cases.data_chaos import Readings, schedule_of
from _cases.data_cluster import DataCluster

from dataservice import Dataset, distribute

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it

WORKERS = 3
# Seconds of work for an element, long enough that workers stay busy during the whole schedule.
WORK_S = 2e-3
ELEMENTS = {"distributed_epoch": 3000, "parallel_epochs": 900}
LIMIT_S = 30.0

SAMPLE = range(6)
MANY = [pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 206)]


@dataclass(frozen=True)
class Scenario:
    """The configuration of one run, derived from a seed.

    Attributes:
        seed: The seed.
        mode: See :func:`distribute`.
        delivery: See :func:`distribute`.
        consumers: Number of consumers that share the epoch.
        durable: Whether the dispatcher is killed and restarted.
        deterministic: Whether the order is fixed.
    """

    seed: int
    mode: str
    delivery: str
    consumers: int
    durable: bool
    deterministic: bool

    @classmethod
    def of(cls, seed):
        """Return the scenario of a seed. Consecutive seeds give different scenarios."""
        deliveries = ["exactly_once"] * 4 + ["at_least_once", "at_most_once"]
        mode = "parallel_epochs" if seed % 4 == 3 else "distributed_epoch"
        delivery, consumers, durable = deliveries[seed % 6], 1 + seed % 3, seed % 2 == 0
        ordered = mode == "distributed_epoch" and delivery == "exactly_once" and seed % 5 in (1, 2)
        return cls(seed, mode, delivery, 1 if ordered else consumers, durable, ordered)

    @property
    def elements(self):
        """The number of elements in the dataset."""
        return ELEMENTS[self.mode]

    def apply(self, cluster, function, job_name):
        """Return the distributed dataset."""
        apply = distribute(
            self.mode,
            cluster.target,
            job_name=None if self.deterministic else job_name,
            delivery=self.delivery,
            deterministic=self.deterministic,
        )
        return Dataset.range(self.elements).map(function).apply(apply)

    def check(self, counts, most):
        """Check that the received elements match the delivery guarantee.

        Args:
            counts: How often each element came.
            most: Total number of workers during the run.
        """
        expected = set(range(self.elements))
        assert set(counts) <= expected
        seen = Counter(counts[element] for element in expected)
        missing = [element for element in expected if not counts[element]]
        assert self.fits(seen, most), f"so many came so often: {dict(seen)}; none of {missing}"

    def fits(self, seen, most):
        """Return whether the numbers of deliveries fit the guarantee."""
        if self.mode == "parallel_epochs":
            most_often = most if self.delivery != "at_least_once" else float("inf")
            whole = len(seen) == 1 and min(seen) >= 1
        else:
            most_often = 1 if self.delivery != "at_least_once" else float("inf")
            whole = set(seen) == {1}
        if self.delivery == "exactly_once":
            return whole and max(seen) <= most_often
        least_often = 1 if self.delivery == "at_least_once" else 0
        return min(seen) >= least_often and max(seen) <= most_often


def work(i):
    time.sleep(WORK_S)
    return i


def run(cluster, steps, readings):
    """Run the steps of a schedule."""
    never = threading.Event()
    for step in steps:
        never.wait(step.wait_s)
        readings.note(f"{step} ...")
        step.apply(cluster)
        readings.note("... done")


@pytest.fixture(scope="module")
def recoveries():
    """Collect the longest time without an element for each seed, and print the worst at the end."""
    found = {}
    yield found
    worst = sorted(found.items(), key=lambda pair: -pair[1])[:5]
    print("worst recoveries:", ", ".join(f"{gap:.2f} s (seed {seed})" for seed, gap in worst))


@pytest.mark.parametrize("seed", [*SAMPLE, *MANY])
def test_an_epoch_in_spite_of_everything(tmp_path, seed, recoveries):
    scenario = Scenario.of(seed)
    rng = random.Random(seed)
    steps = schedule_of(rng, WORKERS, rng.randrange(4, 8), dispatcher=scenario.durable)
    durable = {"work_dir": tmp_path, "fault_tolerant": True} if scenario.durable else {}
    with DataCluster(WORKERS, **durable) as cluster:
        expected = scenario.apply(cluster, lambda i: i, "calm") if scenario.deterministic else []
        order = [int(element) for element in expected]
        datasets = [scenario.apply(cluster, work, "chaos") for _ in range(scenario.consumers)]
        readings = Readings(datasets)
        try:
            run(cluster, steps, readings)
            readings.finish(LIMIT_S)
            registrations = sum(s.action in ("restart_worker", "resume_worker") for s in steps)
            restarts = sum(s.action == "restart_dispatcher" for s in steps)
            scenario.check(readings.counts, (WORKERS + registrations) * (1 + restarts))
            assert not order or readings.order == order
            check_calm(cluster)
        except BaseException as error:
            cluster.dump()
            plan = "\n".join(f"  after {step.wait_s:.3f} s  {step}" for step in steps)
            error.add_note(
                f"{scenario}\nthe schedule:\n{plan}\nwhat was done:\n{readings.report()}"
            )
            raise
        finally:
            readings.close()
    recoveries[seed] = readings.gaps()[0][0]


def check_calm(cluster):
    """Check that the service works normally after the accidents."""
    for worker in cluster.workers:
        assert worker.port
    dataset = Dataset.range(500).apply(distribute("distributed_epoch", cluster.target))
    assert Counter(map(int, dataset)) == dict.fromkeys(range(500), 1)
