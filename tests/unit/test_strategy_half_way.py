"""Pushes whose workers stop while they stream: nothing is lost, and few others wait."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from _cases.endpoints import wait_until
from _cases.servers import Cluster, variable
from safetensors.numpy import load_file

from mpidist import errors
from mpidist.config import config as settings
from mpidist.rpc import endpoint
from strategy import optimizers
from strategy.server import pushes as pushes_module
from strategy.shared import staging
from strategy.shared.shard import BLOCK_BYTES

BLOCK = BLOCK_BYTES // 8
SIZE = 3 * BLOCK + 5
LIMIT_S = 30


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(staging, "PATIENCE_S", 0.002)


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as executor:
        yield executor


class Stops:
    """A worker's end of its ring that stops after some blocks of the next write.

    Attributes:
        reached: Set when it has.
        go_on: Set by the test.
    """

    def __init__(self, connection, blocks, interrupt=False):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._ring, self._blocks, self._interrupt = connection._ring, blocks, interrupt
        self._connection = connection
        connection._ring = self

    def write(self, flat, dtype, scale=1.0):
        self._connection._ring = self._ring
        first = self._blocks * BLOCK
        self._ring.write(flat[:first], dtype, scale)
        self.reached.set()
        if self._interrupt:
            raise KeyboardInterrupt
        assert self.go_on.wait(LIMIT_S)
        self._ring.write(flat[first:], dtype, scale)


def two_workers(make, **options):
    cluster = make()
    strategies = [cluster.worker(i, **options) for i in range(2)]
    with ThreadPoolExecutor(2) as executor:
        made = list(
            executor.map(
                lambda s: (variable(s, "large", SIZE), variable(s, "small", 4)), strategies
            )
        )
    return cluster, strategies, made


def gradient(scale):
    return scale * np.arange(1.0, SIZE + 1)


def push(optimizer, pairs):
    return optimizer.apply_gradients(pairs).result(LIMIT_S)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_only_who_wants_the_same_variable_waits(make, pool, blocks):
    cluster, strategies, made = two_workers(make)
    sgd = optimizers.SGD(1.0)
    stops = Stops(strategies[1]._connections[0], blocks)
    late = pool.submit(push, sgd, [(gradient(1.0), made[1][0]), (np.ones(4), made[1][1])])
    assert stops.reached.wait(LIMIT_S)
    (pushes,) = [server._pushes for server in cluster.parameter_servers]
    extra = variable(strategies[0], "extra", SIZE)
    for _ in range(3):
        push(sgd, [(gradient(2.0), extra)])
    np.testing.assert_array_equal(extra, -3 * gradient(2.0))
    read = strategies[0]._connections[0].pulls.start
    small = np.empty(4)
    read(made[0][1].remotes[0], small).result(LIMIT_S)
    np.testing.assert_array_equal(small, np.zeros(4))
    copy = np.empty(SIZE)
    waiting = [
        pool.submit(read(made[0][0].remotes[0], copy).result),
        pool.submit(push, sgd, [(gradient(4.0), made[0][0])]),
    ]
    assert pushes._half_way
    assert not any(one.done() for one in waiting)
    stops.go_on.set()
    late.result(LIMIT_S)
    for one in waiting:
        one.result(LIMIT_S)
    assert copy[0] in (-1, -5)  # before or after the other push, and never in the middle of one
    np.testing.assert_array_equal(copy, gradient(copy[0]))
    np.testing.assert_array_equal(made[0][0], -gradient(1.0) - gradient(4.0))
    np.testing.assert_array_equal(made[0][1], -np.ones(4))
    shard = cluster.parameter_servers[0]._catalogue.by_name["large"].shard
    assert set(shard.versions) == {2 * shard.version}
    wait_until(lambda: not pushes._half_way)


def test_a_step_of_all_workers(make, pool):
    _, strategies, made = two_workers(make, mode="sync")
    sgd = optimizers.SGD(1.0)
    stops = Stops(strategies[1]._connections[0], 2)
    for step in (1.0, 2.0):
        steps = [pool.submit(push, sgd, [(gradient(step * (n + 1)), made[n][0])]) for n in range(2)]
        assert stops.reached.wait(LIMIT_S)
        stops.go_on.set()
        for one in steps:
            one.result(LIMIT_S)
    np.testing.assert_array_equal(made[0][0], -1.5 * gradient(1.0) - 1.5 * gradient(2.0))


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_interrupted_worker_holds_up_nobody(make, pool, mode, blocks):
    cluster, strategies, made = two_workers(make, mode=mode)
    sgd = optimizers.SGD(1.0)
    Stops(strategies[1]._connections[0], blocks, interrupt=True)

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            push(sgd, [(gradient(1.0), made[1][0]), (np.ones(4), made[1][1])])

    steps = [pool.submit(interrupted)]
    if mode == "sync":

        def innocent():
            with pytest.raises(errors.AbortedError, match=r"worker 1(, whose| was interrupted)"):
                push(sgd, [(gradient(1.0), made[0][0]), (np.ones(4), made[0][1])])

        steps.append(pool.submit(innocent))
    for one in steps:
        one.result(LIMIT_S)
    with pytest.raises(errors.FailedPreconditionError, match="interrupted half-way"):
        push(sgd, [(gradient(1.0), made[1][0])])
    made[0][0].assign(gradient(3.0))
    np.testing.assert_array_equal(made[0][0], gradient(3.0))
    remote = made[0][0].remotes[0]
    assert remote.shared.try_read(np.empty(SIZE)) is not None  # not only by message
    np.testing.assert_array_equal(made[0][1], np.zeros(4))  # what came after it was dropped
    wait_until(lambda: not cluster.parameter_servers[0]._pushes._half_way)


def test_a_worker_that_leaves_in_the_middle(make, pool):
    cluster, strategies, made = two_workers(make)
    sgd = optimizers.SGD(1.0)
    stops = Stops(strategies[1]._connections[0], 1)
    late = pool.submit(push, sgd, [(gradient(1.0), made[1][0])])
    assert stops.reached.wait(LIMIT_S)
    waiting = pool.submit(push, sgd, [(gradient(2.0), made[0][0])])
    cluster.gone.add(("worker", 1))
    waiting.result(LIMIT_S)
    cluster.gone.clear()
    stops.go_on.set()
    with pytest.raises(errors.AbortedError, match="worker 1 has left"):
        late.result(LIMIT_S)
    # The first block had come, and has been applied.
    expected = -gradient(2.0)
    expected[:BLOCK] -= gradient(1.0)[:BLOCK]
    np.testing.assert_array_equal(made[0][0], expected)


def test_a_save_has_all_of_a_push_that_had_begun(make, pool, tmp_path):
    _, strategies, made = two_workers(make)
    sgd = optimizers.SGD(1.0)
    stops = Stops(strategies[1]._connections[0], 2)
    late = pool.submit(push, sgd, [(gradient(1.0), made[1][0])])
    assert stops.reached.wait(LIMIT_S)
    saving = pool.submit(strategies[0].save, str(tmp_path))
    stops.go_on.set()
    late.result(LIMIT_S)
    path = saving.result(LIMIT_S)
    found = load_file(f"{path}/ps-0-of-1.safetensors")
    np.testing.assert_array_equal(found["large:data"], -gradient(1.0))


def test_calls_that_wait_for_others_have_no_limit(make, pool, monkeypatch):
    """What is applied later must not be reported as failed: it would be pushed once more."""
    _, strategies, made = two_workers(make)
    calls = []
    for strategy in strategies:
        endpoint = strategy._host.endpoint
        call = endpoint.call

        def watched(peer, method, *arguments, call=call, timeout=None, **options):
            calls.append((method, timeout))
            return call(peer, method, *arguments, timeout=timeout, **options)

        monkeypatch.setattr(endpoint, "call", watched)
    push(optimizers.SGD(1.0), [(gradient(1.0), made[0][0])])
    assert ("ps/Push", float("inf")) in calls


def test_a_late_worker_goes_on_with_whole_steps(make, pool):
    cluster, strategies, made = two_workers(make, mode="sync", backup_workers=1)
    sgd = optimizers.SGD(1.0)
    stops = Stops(strategies[1]._connections[0], 1)
    step = [
        pool.submit(push, sgd, [(gradient(1.0), large), (np.ones(4), small)])
        for large, small in made[1:]
    ]
    assert stops.reached.wait(LIMIT_S)
    late = pool.submit(push, sgd, [(gradient(9.0), made[0][0]), (np.ones(4), made[0][1])])
    (pushes,) = [server._pushes for server in cluster.parameter_servers]
    wait_until(lambda: pushes._steps and pushes._steps[0].waiting)
    assert not late.done()
    stops.go_on.set()
    assert not late.result(LIMIT_S).contributed
    np.testing.assert_array_equal(made[0][1], -np.ones(4))
    np.testing.assert_array_equal(made[0][0], -gradient(1.0))
    assert strategies[0].global_step.numpy() == 1
    step[0].result(LIMIT_S)


def test_who_only_reads_does_not_keep_a_save_waiting(make, pool):
    cluster = make(near=False)
    lines = [cluster.worker(index)._connections[0] for index in range(2)]
    remotes = [
        variable(strategy, "large", SIZE).remotes[0]
        for strategy in (cluster.worker(0), cluster.worker(1))
    ]
    (server,) = cluster.parameter_servers
    halves = [slice(0, BLOCK), slice(BLOCK, SIZE)]
    pieces = [[np.ones(half.stop - half.start) for half in halves] for _ in lines]

    def ask(reader, number):
        line = remotes[reader].connection
        return line.pulls._ask(remotes[reader], 1, halves[number].start, pieces[reader][number])

    ask(0, 0).result(LIMIT_S)
    held = lines[0].snapshots.hold("part")
    wait_until(lambda: server._pushes._later)
    second = ask(1, 0)
    wait_until(lambda: server._pushes._put_off)
    ask(0, 1).result(LIMIT_S)
    held.result(LIMIT_S)  # though somebody else wants to read
    lines[0].snapshots.release("part").wait()
    second.result(LIMIT_S)
    ask(1, 1).result(LIMIT_S)
    assert not any(piece.any() for own in pieces for piece in own)


def test_what_stands_half_way_is_not_counted_as_busy(make, monkeypatch):
    cluster = make()
    pushes = cluster.parameter_servers[0]._pushes
    clock = iter([0.0, 1.0, 50.0, 51.5, 99.0, 99.25])
    monkeypatch.setattr(pushes_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    before = pushes._metrics.values["busy_s"]
    assert list(pushes._busy(iter([None, None]))) == [None, None]
    assert pushes._metrics.values["busy_s"] - before == 1.0 + 1.5 + 0.25


def test_a_first_value_may_take_longer_than_a_call(make, pool, monkeypatch):
    cluster = make()
    strategies = [cluster.worker(index) for index in range(2)]
    monkeypatch.setattr(endpoint, "config", replace(settings, call_timeout_s=0.05))

    def slow(shape, dtype):
        threading.Event().wait(0.3)  # which is longer
        return np.ones(shape, dtype)

    made = pool.map(lambda strategy: variable(strategy, "v", 3, slow), strategies)
    for v in made:
        np.testing.assert_array_equal(v, np.ones(3))
