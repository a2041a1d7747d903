"""Threads of one worker that push and pull at the same time, through one connection."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from _cases.clusters import on_cluster

from strategy import get_variable, optimizers


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["shared", "rma", "p2p"])
@pytest.mark.parametrize("size", [3, 4095, 4096, (1 << 18) + 5])  # staged from 4096 on
def test_each_thread_sees_its_own_pushes_and_none_is_lost(world, transport, size):
    threads, rounds = 2, 10 if size > 1 << 18 else 30

    def train(strategy, workers):
        with strategy.scope():
            shared = get_variable("shared", size, initializer=0)
        together = threading.Barrier(threads)

        def push_and_pull():
            sgd, minus_one = optimizers.SGD(1.0), np.full(size, -1.0)
            wrong = []
            together.wait(30)
            for step in range(1, rounds + 1):
                sgd.apply_gradients([(minus_one, shared)])
                value = shared.read_value()
                if value.min() != value.max() or value[0] < step:
                    wrong.append((step, np.unique(value)))
            return wrong

        workers.barrier()
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(push_and_pull) for _ in range(threads)]
            wrong = [thread.result() for thread in running]
        workers.barrier()
        total = strategy.num_workers * threads * rounds
        return wrong, total, shared.read_value(), shared.version, int(strategy.global_step)

    result = on_cluster(world, 1, train, transport)
    if result is not None:
        wrong, total, value, version, steps = result
        assert wrong == [[], []]
        np.testing.assert_array_equal(value, np.full(size, total))
        assert (version, steps) == (total + 1, total)
