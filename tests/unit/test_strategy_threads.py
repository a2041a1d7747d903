"""Threads of one worker that push and pull at the same time, through one connection."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mpidist
from mpidist.errors import InvalidArgumentError
from strategy import ParameterServerStrategy, get_variable, optimizers


@pytest.fixture(autouse=True, params=["auto", "rma", "p2p"])
def strategy(request):
    """Yield a strategy with an open scope."""
    cluster = {"ps": ["localhost:0"], "worker": ["localhost:0"]}
    with mpidist.Server(cluster, "worker", 0):
        strategy = ParameterServerStrategy(transport=request.param)
        with strategy.scope():
            yield strategy


@pytest.mark.parametrize("size", [1, 1000, 2048, 300_000])  # in a message; staged from 2048 on
def test_each_sees_its_own_pushes_and_none_is_lost(strategy, size):
    threads, rounds = 4, 12 if size > 100_000 else 60
    shared = get_variable("shared", size, np.float64, "zeros")
    own = [get_variable(f"own/{n}", size, np.float64, "zeros") for n in range(threads)]
    together = threading.Barrier(threads)

    def train(n):
        sgd, minus_one = optimizers.SGD(1.0), np.full(size, -1.0)
        wrong = []
        together.wait(30)
        for step in range(1, rounds + 1):
            sgd.apply_gradients([(minus_one, shared), (minus_one, own[n])])
            value = shared.read_value()
            if value.min() != value.max() or value[0] < step:
                wrong.append((step, "shared", value))
            if not (own[n].read_value() == step).all():
                wrong.append((step, own[n].name))
        return wrong

    with ThreadPoolExecutor(threads) as pool:
        for result in [pool.submit(train, n) for n in range(threads)]:
            assert result.result(60) == []
    np.testing.assert_array_equal(shared, np.full(size, threads * rounds))
    assert shared.version == threads * rounds + 1
    assert int(strategy.global_step) == threads * rounds


def test_all_wait_for_a_push_under_way(strategy):
    events = queue.SimpleQueue()

    def drive(work, deadline):
        events.put("waits")
        work.wait_for_event(deadline)

    connection = strategy.global_step.remotes[0].connection
    push = mpidist.Work("push", drive)
    connection._under_way.append(push)

    def settle():
        connection.settle()
        events.put("settled")

    threads = [threading.Thread(target=settle) for _ in range(3)]
    try:
        for thread in threads:  # the later threads start while the first waits
            thread.start()
            assert events.get(timeout=30) == "waits"
    finally:
        push.complete([])
    assert [events.get(timeout=30) for _ in threads] == ["settled"] * 3
    for thread in threads:
        thread.join(30)


def test_a_push_that_fails_while_another_thread_waits_is_not_forgotten(strategy):
    counts = get_variable("counts", 2, int, 0)
    sgd = optimizers.SGD(1.0)

    def drive(work, deadline):
        sgd.apply_gradients([(np.ones(2, int), counts)]).block(deadline)
        work.complete([])

    connection = counts.remotes[0].connection
    connection._under_way.append(mpidist.Work("push", drive))
    connection.settle()
    with pytest.raises(InvalidArgumentError, match="SGD cannot change variable 'counts'"):
        connection.settle()
    connection.settle()
