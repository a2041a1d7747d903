"""Schedules in mode sync: workers that make equal ones agree, and different ones are refused."""

import functools
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


KINDS = {
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
