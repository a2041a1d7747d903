"""Threads of one worker that save, restore and close at the same time."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from _cases.servers import Cluster, variable

from mpidist import errors
from strategy import ParameterServerStrategy, optimizers

SIZE = 5000


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["local", "two servers"])
def make(request, stack):
    """Return a function that makes strategies of one worker, each with variables v and u."""
    cluster = Cluster(stack, servers=2)

    def one():
        if request.param == "local":
            strategy = stack.enter_context(ParameterServerStrategy())
        else:
            strategy = cluster.worker(0, placement="round_robin")
        return strategy, [variable(strategy, name, SIZE) for name in "vu"]

    return one


def pushing(made):
    """Push to v and u in a thread until an event is set. Return the event and the thread."""
    stop, sgd = threading.Event(), optimizers.SGD(1.0)

    def push():
        while not stop.is_set():
            sgd.apply_gradients([(-np.ones(v.shape), v) for v in made])

    thread = threading.Thread(target=push)
    thread.start()
    return stop, thread


def numbers(made):
    """Return the distinct values of each variable."""
    return [np.unique(v.numpy()).tolist() for v in made]


def test_threads_that_save_at_once_save_whole_checkpoints(make, tmp_path):
    strategy, made = make()
    together = threading.Barrier(3)

    def save(_):
        together.wait(60)
        return [strategy.save(str(tmp_path), keep=1000) for _ in range(15)]

    stop, pusher = pushing(made)
    try:
        with ThreadPoolExecutor(3) as pool:
            paths = {path for own in pool.map(save, range(3)) for path in own}
    finally:
        stop.set()
        pusher.join(60)
    for path in paths:
        step = strategy.restore(path)
        assert path.endswith(f"step-{step}")
        assert numbers(made) == [[step], [step]]


def test_strategies_of_one_worker_that_save_at_once_wait_for_each_other(stack, tmp_path):
    cluster = Cluster(stack, servers=2)
    strategies = [cluster.worker(0) for _ in range(3)]
    made = [[variable(strategy, name, SIZE) for name in "vu"] for strategy in strategies]
    together = threading.Barrier(3)

    def save(number):
        together.wait(60)
        return [strategies[number].save(str(tmp_path / str(number)), keep=1000) for _ in range(15)]

    stop, pusher = pushing(made[0])
    try:
        with ThreadPoolExecutor(3) as pool:
            paths = [path for own in pool.map(save, range(3)) for path in own]
    finally:
        stop.set()
        pusher.join(60)
    for path in paths:
        step = strategies[0].restore(path)
        assert numbers(made[0]) == [[step], [step]]


def test_a_save_beside_restores_contains_one_of_them(make, tmp_path):
    strategy, made = make()
    paths = []
    for value in (1.0, 2.0):
        for v in made:
            v.assign(value)
        paths.append(strategy.save(str(tmp_path / str(value))))

    def restore(_):
        return [strategy.restore(path) for path in paths * 5]

    def save(number):
        return [strategy.save(str(tmp_path / f"{number}-{n}")) for n in range(10)]

    with ThreadPoolExecutor(4) as pool:
        restored = [pool.submit(restore, number) for number in range(2)]
        saved = [pool.submit(save, number) for number in range(2)]
        assert [future.result(60) for future in restored] == [[0] * 10] * 2
        found = [path for future in saved for path in future.result(60)]
    for path in found:
        strategy.restore(path)
        assert numbers(made) in ([[1.0], [1.0]], [[2.0], [2.0]])


def test_checkpoints_of_managers_are_consistent_while_pushes_are_applied(stack, tmp_path):
    cluster = Cluster(stack, servers=2, workers=1)
    strategies = [cluster.worker(0) for _ in range(3)]
    size = 1 << 19  # so large that pushes arrive during the copies
    made = [[variable(strategy, name, size) for name in "vu"] for strategy in strategies]
    paths, together = [], threading.Barrier(2)

    def save(number):
        folder = str(tmp_path / str(number))
        with strategies[number].checkpoints(folder, keep=1000) as checkpoints:
            checkpoints.restore()
            together.wait(60)
            for _ in range(8):
                checkpoints.save()
            paths.append(folder)

    stop, pusher = pushing(made[0])
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(save, (1, 2), timeout=120))
    finally:
        stop.set()
        pusher.join(60)
    saved = [str(path) for folder in paths for path in Path(folder).glob("step-*")]
    assert len(saved) >= 16
    for path in saved:
        step = strategies[0].restore(path)
        assert numbers(made[0]) == [[step], [step]]


def test_closing_waits_for_a_save(make, tmp_path):
    strategy, made = make()
    saves = [threading.Event() for _ in range(3)]

    def save(number, paths):
        while True:
            paths.append(strategy.save(str(tmp_path / str(number)), keep=1000))
            saves[number].set()

    def save_until_closed(number):
        paths = []
        with pytest.raises(errors.FailedPreconditionError, match="the strategy has been closed"):
            save(number, paths)
        return paths

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(save_until_closed, number) for number in range(3)]
        assert all(event.wait(60) for event in saves)
        strategy.close()
        paths = [path for future in futures for path in future.result(60)]
    other, made = make()
    for path in paths[:: len(paths) // 3]:
        other.restore(path)
    assert made[0].assign_add(np.ones(SIZE)) > 0  # the servers hold no pushes


def test_a_save_in_a_signal_handler_during_a_save_is_refused(make, tmp_path):
    strategy, made = make()
    before, refusals = signal.getsignal(signal.SIGUSR1), []

    def handle(*_):
        for call in (lambda: strategy.save(str(tmp_path)), strategy.close, strategy.finish):
            with pytest.raises(errors.FailedPreconditionError, match="in the middle") as info:
                call()
            refusals.append(info.value.message)

    class Extra(dict):
        def items(self):
            signal.raise_signal(signal.SIGUSR1)
            return super().items()

    signal.signal(signal.SIGUSR1, handle)
    try:
        path = strategy.save(str(tmp_path), extra=Extra(state=b"x"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refusals) == 3
    assert strategy.restore(path) == 0
    assert made[0].assign_add(np.ones(SIZE)) > 0
