"""Schedules in mode sync: workers that make equal ones agree, and different ones are refused."""

import functools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from _cases.servers import Cluster

from mpidist import errors
from strategy import get_variable, optimizers, schedules


def decay(rate, step):
    return rate / (1 + step)


def constant(rate):
    return lambda step: rate


def constant_of(values):
    return lambda step: 0.5 if len(values) else 0.25


class Warmup:
    def __init__(self, top, rates=()):
        self.top, self.rates = top, np.array(rates)

    def __call__(self, step):
        return self.top

    def method(self, step):
        return self.top


class Slotted:
    __slots__ = ("top",)

    def __init__(self, top):
        self.top = top

    def __call__(self, step):
        return self.top


def train(makers):
    """Make one step of two workers in mode sync, each with a schedule of its own making."""

    def work(index):
        strategy = cluster.worker(index, mode="sync")
        with strategy.scope():
            v = get_variable("v", 3, np.float64, 0.0)
        junk = [object() for _ in range(100 * index)]  # so that addresses differ
        optimizer = optimizers.SGD(makers[index](), name="sgd")
        del junk
        try:
            optimizer.apply_gradients([(np.ones(3), v)]).wait()
            return v.read_value()
        finally:
            strategy.finish()

    with ExitStack() as stack:
        cluster = Cluster(stack)
        with ThreadPoolExecutor(2) as pool:
            return [future.result(60) for future in [pool.submit(work, n) for n in range(2)]]


RATE = 0.5
TABLES = {0.5: {"a": 0.5, "b": 1.0}, 0.25: {"a": 0.25, "b": 1.0}}


def of_globals(rate):
    """Functions whose code is the same, and whose module has another value."""
    space = {"RATE": rate}
    exec("def schedule(step):\n    return RATE", space)
    return space["schedule"]


def calling(rate):
    def inner(step):
        return rate if rate == 0.5 else rate * 1.0

    space = {"inner": inner}
    exec("def schedule(step):\n    return [inner(each) for each in (step,)][0]", space)
    return space["schedule"]


class Locked(Warmup):
    """An object that holds what shows its address."""

    def __init__(self, top):
        super().__init__(top)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {"top": self.top, "rates": self.rates}


def recursive(rate):
    def schedule(step):
        return rate if step < 1 else schedule(step - 1)

    return schedule


def with_empty_cell(rate):
    def schedule(step):
        return rate if step >= 0 else never

    if schedule is None:
        never = 0
    return schedule


def in_code(half, quarter):
    """Two functions of one name, which differ in their code."""
    return lambda rate: half if rate == 0.5 else quarter


KINDS = {
    "operator": in_code(lambda step: 0.1 * (step + 1), lambda step: 0.1 / (step + 1)),
    "attribute": in_code(lambda step: np.float64(0.5).real, lambda step: np.float64(0.5).imag),
    "text": in_code(lambda step: TABLES[0.5]["a"], lambda step: TABLES[0.5]["b"]),
    "tuple": in_code(lambda step: (0.5, 0.1)[step], lambda step: (0.5, 0.2)[step]),
    "nested": in_code(
        lambda step: max([0.5 * each for each in (1,)]),
        lambda step: max([0.5 + each for each in (1,)]),
    ),
    "default": in_code(lambda step, rate=0.5: rate, lambda step, rate=0.25: rate),
    "global": of_globals,
    "called function": calling,
    "captured set": lambda rate: constant_of({"warm", "up", "then", "decay", rate}),
    "captured dict": lambda rate: constant_of(dict.fromkeys({"warm", "up", "decay"}, rate)),
    "object with a lock": Locked,
    "recursive": recursive,
    "empty cell": with_empty_cell,
    "close floats": lambda rate: Warmup(0.5, [0.1 + rate * 1e-12]),
    "partial": lambda rate: functools.partial(decay, rate),
    "partial of a partial": lambda rate: functools.partial(functools.partial(decay, rate)),
    "object": Warmup,
    "object with slots": Slotted,
    "bound method": lambda rate: Warmup(rate).method,
    "closure": constant,
    "object with an array": lambda rate: Warmup(0.5, [rate] * 5000),
    "object in an object": lambda rate: Warmup(0.5, [Warmup(rate)]).method,
    "of this package": lambda rate: schedules.ExponentialDecay(rate, 10, 0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_schedules_of_two_workers_agree(kind):
    for value in train([lambda: KINDS[kind](0.5)] * 2):
        assert value[0] < 0


@pytest.mark.parametrize("kind", KINDS)
def test_different_schedules_of_two_workers_are_refused(kind):
    with pytest.raises(errors.InvalidArgumentError, match="learning rate"):
        train([lambda: KINDS[kind](0.5), lambda: KINDS[kind](0.25)])


DESCRIBED = """
from strategy import optimizers

def schedule_of(names):
    return lambda step: 0.5 if "warm" in {"warm", "up", "then", "decay"} else len(names)

print(optimizers.SGD(schedule_of({"warm", "up", "then", "decay", object})))
"""


def test_a_schedule_is_described_alike_in_all_processes():
    texts = {
        subprocess.run(
            [sys.executable, "-c", DESCRIBED],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(texts) == 1
    assert "schedule_of" in texts.pop()
