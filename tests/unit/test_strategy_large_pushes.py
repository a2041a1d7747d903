"""Pushes of several messages: applied whole or not at all, without waits for slow senders."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from _cases.endpoints import wait_until
from _cases.servers import Cluster, variable
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mpidist import errors
from mpidist.config import config as settings
from mpidist.rpc import endpoint
from strategy import IndexedSlices, creation, optimizers
from strategy.client import changes
from strategy.gradients import describe_step
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol import push_message
from strategy.protocol.push_message import (
    INCREMENT,
    WHOLE,
    PushMessage,
    pack_entries,
    pack_reply,
    unpack_entries,
    unpack_reply,
)

SLICE = 1 << 20
SIZE = 3 * SLICE // 8 + 5  # float64: four messages
LIMIT_S = 30


@pytest.fixture
def make(monkeypatch):
    for module in (changes, push_message):
        monkeypatch.setattr(module, "SLICE_BYTES", SLICE)
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


started, go_on = threading.Event(), threading.Event()


def keep_busy(param, grad, slots, rate, step):
    """Occupy the server, as an optimizer function, until the test sets ``go_on``."""
    started.set()
    assert go_on.wait(LIMIT_S)


@pytest.fixture
def busy():
    """Yield an optimizer with pushes that occupy the server."""
    started.clear()
    go_on.clear()
    yield optimizers.Function(keep_busy)
    go_on.set()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as executor:
        yield executor


class Stops:
    """A hook that stops a worker before or after one message of its next push.

    Attributes:
        reached: Set when the worker has stopped.
        go_on: Set by the test.
    """

    def __init__(self, strategy, message, interrupt=False, after=False):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._left, self._interrupt, self._after = message, interrupt, after
        self._endpoint = strategy._host.endpoint
        self._call = self._endpoint.call
        self._endpoint.call = self

    def __call__(self, peer, method, *arguments, **options):
        stop = False
        if method in ("ps/Push", "ps/PushSlice"):
            stop = self._left == 0
            self._left -= 1
        if stop and self._after:
            self._call(peer, method, *arguments, **options)
        if stop:
            self._endpoint.call = self._call
            self.reached.set()
            if self._interrupt:
                raise KeyboardInterrupt
            assert self.go_on.wait(LIMIT_S)
        return self._call(peer, method, *arguments, **options)


def two_workers(make, pool, cluster_options=None, **options):
    cluster = make(**(cluster_options or {}))
    strategies = [cluster.worker(i, **options) for i in range(2)]
    made = list(
        pool.map(lambda s: (variable(s, "large", SIZE), variable(s, "small", 4)), strategies)
    )
    return cluster, strategies, made


def gradient(scale):
    return scale * np.arange(1.0, SIZE + 1)


def push(optimizer, pairs):
    return optimizer.apply_gradients(pairs).result(LIMIT_S)


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i4", "u1"])
@pytest.mark.parametrize("size", [SLICE - 1, SLICE, SLICE + 1, 3 * SLICE + 7])
def test_all_sizes_around_slices(make, dtype, size):
    strategy = make().worker(0)
    v = variable(strategy, "v", size, "zeros", np.dtype(dtype))
    values = (np.arange(size) % 100).astype(dtype)
    v.assign_add(values)
    v.assign_add(values[::-1])
    np.testing.assert_array_equal(v, values + values[::-1])


def test_many_kinds_in_one_push(make):
    strategy = make().worker(0)
    shapes = {"tiny": 3, "large": SIZE, "table": (9, 40_000), "other": 7, "empty": (0, 4)}
    made = {name: variable(strategy, name, shape) for name, shape in shapes.items()}
    expected = {name: np.zeros(shape) for name, shape in shapes.items()}
    rng = np.random.default_rng(0)
    for _ in range(3):
        grads = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        rows = IndexedSlices(grads["table"][[4, 1, 8]], [4, 1, 8])
        pairs = [(rows if name == "table" else grads[name], v) for name, v in made.items()]
        push(optimizers.SGD(1.0), pairs)
        for name in shapes:
            here = [4, 1, 8] if name == "table" else ...
            expected[name][here] -= grads[name][here]
    for name, v in made.items():
        np.testing.assert_array_equal(v, expected[name])


def test_arrays_may_be_changed_when_the_call_returns(make, pool, busy):
    """The server is busy during the push, so it reads the arrays after the call has returned."""
    _, strategies, made = two_workers(make, pool)
    sgd = optimizers.SGD(1.0)
    push(sgd, [(np.zeros(SIZE), made[1][0])])  # the server knows the optimizer from now on
    first = busy.apply_gradients([(np.ones(4), made[0][1])])
    assert started.wait(LIMIT_S)
    grad = gradient(1.0)
    work = sgd.apply_gradients([(grad, made[1][0])])
    grad[:] = np.nan
    go_on.set()
    work.result(LIMIT_S)
    first.result(LIMIT_S)
    np.testing.assert_array_equal(made[0][0], -gradient(1.0))
    assert strategies[0].global_step.numpy() == 3


@pytest.mark.parametrize("message", [0, 1, 3])
def test_a_stopped_worker_holds_up_nobody(make, pool, message):
    cluster, strategies, made = two_workers(make, pool)
    sgd = optimizers.SGD(1.0)
    stops = Stops(strategies[1], message)
    late = pool.submit(push, sgd, [(gradient(1.0), made[1][0]), (np.ones(4), made[1][1])])
    assert stops.reached.wait(LIMIT_S)
    for _ in range(3):
        push(sgd, [(gradient(2.0), made[0][0])])
    np.testing.assert_array_equal(made[0][0], -3 * gradient(2.0))
    np.testing.assert_array_equal(made[0][1], np.zeros(4))
    shard = cluster.parameter_servers[0]._store.by_name["large"].shard
    assert set(shard.versions) == {2 * shard.version}
    stops.go_on.set()
    late.result(LIMIT_S)
    np.testing.assert_array_equal(made[0][0], -7 * gradient(1.0))
    np.testing.assert_array_equal(made[0][1], -np.ones(4))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("message", range(4))
@pytest.mark.parametrize("servers", [1, 2])
def test_an_interrupted_push_is_applied_whole_or_not_at_all(
    make, pool, tmp_path, servers, message, after
):
    _, strategies, made = two_workers(make, pool, {"servers": servers})
    sgd = optimizers.SGD(1.0)
    pairs = [(gradient(1.0), made[1][0]), (np.ones(4), made[1][1])]
    Stops(strategies[1], message, interrupt=True, after=after)
    with pytest.raises(KeyboardInterrupt):
        push(sgd, pairs)
    pool.submit(strategies[0].save, str(tmp_path)).result(LIMIT_S)  # waits for no push
    push(sgd, pairs)  # the worker's next push works
    push(sgd, [(gradient(2.0), made[0][0])])
    large, small = made[0][0].numpy(), made[0][1].numpy()
    counted = -small[0] - 1
    assert counted in (0, 1)
    np.testing.assert_array_equal(small, np.full(4, -1 - counted))
    arrived = (-large / gradient(1.0) - 3).round(9)
    assert set(arrived) in ({0}, {1})
    if servers == 1:
        assert set(arrived) == {counted}
        assert counted == (after and message == 3)


@pytest.mark.parametrize("message", [0, 2, 3])
def test_an_interrupted_step_fails_for_all_workers(make, pool, message):
    _, strategies, made = two_workers(make, pool, mode="sync")
    sgd = optimizers.SGD(1.0)
    Stops(strategies[1], message, interrupt=True)

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            push(sgd, [(gradient(1.0), made[1][0]), (np.ones(4), made[1][1])])

    def innocent():
        with pytest.raises(errors.AbortedError, match="worker 1, whose"):
            push(sgd, [(gradient(1.0), made[0][0]), (np.ones(4), made[0][1])])

    for one in [pool.submit(interrupted), pool.submit(innocent)]:
        one.result(LIMIT_S)
    np.testing.assert_array_equal(made[0][0], np.zeros(SIZE))
    steps = [pool.submit(push, sgd, [(gradient(n + 1.0), made[n][0])]) for n in range(2)]
    for one in steps:
        one.result(LIMIT_S)
    np.testing.assert_array_equal(made[0][0], -1.5 * gradient(1.0))


def test_a_step_of_all_workers(make, pool):
    _, strategies, made = two_workers(make, pool, mode="sync")
    sgd = optimizers.SGD(1.0)
    stops = Stops(strategies[1], 2)
    for step in (1.0, 2.0):
        steps = [pool.submit(push, sgd, [(gradient(step * (n + 1)), made[n][0])]) for n in range(2)]
        assert stops.reached.wait(LIMIT_S)
        stops.go_on.set()
        for one in steps:
            one.result(LIMIT_S)
    np.testing.assert_array_equal(made[0][0], -1.5 * gradient(1.0) - 1.5 * gradient(2.0))


def test_a_late_worker_goes_on_with_whole_steps(make, pool):
    cluster, strategies, made = two_workers(make, pool, mode="sync", backup_workers=1)
    sgd = optimizers.SGD(1.0)
    stops = Stops(strategies[1], 1)
    step = pool.submit(push, sgd, [(gradient(1.0), made[1][0]), (np.ones(4), made[1][1])])
    assert stops.reached.wait(LIMIT_S)
    late = pool.submit(push, sgd, [(gradient(9.0), made[0][0]), (np.ones(4), made[0][1])])
    (pushes,) = [server._pushes for server in cluster.parameter_servers]
    wait_until(lambda: any(one.waiting for one in list(pushes._steps.values())))
    assert not late.done()
    stops.go_on.set()
    assert not late.result(LIMIT_S).contributed
    np.testing.assert_array_equal(made[0][1], -np.ones(4))
    np.testing.assert_array_equal(made[0][0], -gradient(1.0))
    assert strategies[0].global_step.numpy() == 1
    step.result(LIMIT_S)


def test_checkpoints_have_no_part_of_a_push(make, pool, tmp_path):
    _, strategies, made = two_workers(make, pool)
    sgd = optimizers.SGD(1.0)
    push(sgd, [(gradient(1.0), made[0][0])])
    stops = Stops(strategies[1], 2)
    late = pool.submit(push, sgd, [(gradient(5.0), made[1][0])])
    assert stops.reached.wait(LIMIT_S)
    path = strategies[0].save(str(tmp_path))
    found = load_file(f"{path}/ps-0-of-1.safetensors")
    np.testing.assert_array_equal(found["large:data"], -gradient(1.0))
    push(sgd, [(gradient(1.0), made[0][0])])
    strategies[0].restore(path)
    np.testing.assert_array_equal(made[0][0], -gradient(1.0))
    stops.go_on.set()
    late.result(LIMIT_S)
    np.testing.assert_array_equal(made[0][0], -gradient(6.0))


def test_memory_of_messages_under_way_is_bounded(make, monkeypatch, busy):
    """The messages of a worker's pushes use at most half of the credit."""
    strategy = make().worker(0)
    v = variable(strategy, "v", 4 * SIZE)
    small = variable(strategy, "small", 4)
    endpoint, sent = strategy._host.endpoint, []
    call = endpoint.call

    def watched(peer, method, body, buffers=(), **options):
        work = call(peer, method, body, buffers, **options)
        sent.append((work, sum(buffer.nbytes for buffer in buffers)))
        return work

    def bytes_in_flight():
        return sum(nbytes for work, nbytes in sent if not work.is_completed())

    monkeypatch.setattr(endpoint, "call", watched)
    monkeypatch.setattr(
        "strategy.client.connection.settings", replace(settings, credit_bytes=6 * SLICE)
    )
    busy.apply_gradients([(np.ones(4), small)])
    assert started.wait(LIMIT_S)
    thread = threading.Thread(target=lambda: v.assign(np.ones(4 * SIZE)))
    thread.start()
    wait_until(lambda: bytes_in_flight() >= 2 * SLICE)
    thread.join(0.2)
    assert thread.is_alive()
    assert bytes_in_flight() <= 3 * SLICE
    go_on.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    np.testing.assert_array_equal(v, np.ones(4 * SIZE))


@pytest.mark.parametrize(
    ("sequence", "slices", "arrays", "match"),
    [
        (3, 0, [], "has 0 bytes where an array of float64"),
        (3, 0, [np.zeros(3)], "has 3 values of float64 where 4 are needed"),
        (3, 0, [np.zeros(5)], "has more values than its changes need"),
        (3, 0, [np.zeros(4), np.zeros(1)], "has more values than its changes need"),
        (3, 2, [np.zeros(4)], "got 0 slices of worker 0, and expected 2"),
        (2, 0, [np.zeros(4)], "got push 2 of worker 0 after push 2"),
    ],
)
def test_bad_messages_change_nothing(make, sequence, slices, arrays, match):
    strategy = make().worker(0)
    v = variable(strategy, "v", 4, "ones")
    (connection,) = strategy._connections
    assert connection.sequence == 2
    entries = pack_entries([(v.remotes[0].number, pb.ADD, WHOLE, 0)])
    bad = PushMessage(connection.number, sequence, slices, entries=entries, seen=(0,), rates=(0.0,))
    with pytest.raises(errors.Error, match=match):
        connection.start("Push", bad.pack(), arrays).result()
    connection._sequence = 3
    v.assign_add(1)
    np.testing.assert_array_equal(v, np.full(4, 2.0))


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ((999, pb.ADD, WHOLE, 0), "changes variable 999, and there are 2"),
        ((1, pb.ADD, WHOLE, 200), "dtype number 200"),
        ((1, pb.ADD, INCREMENT, 0), "increments variable 'v' of shape"),
        ((1, pb.FIRST_OPTIMIZER - 1, WHOLE, 0), "has no rule"),
        ((1, pb.FIRST_OPTIMIZER + 9, WHOLE, 0), "has no rule"),
    ],
)
def test_bad_entries_fail_for_all_members_of_a_step(make, pool, mode, entry, match):
    cluster = make()
    strategies = [cluster.worker(index, mode=mode) for index in range(2)]
    v, _ = (variable(strategy, "v", 4, "ones") for strategy in strategies)
    sgd, message = optimizers.SGD(1.0), {"entries": pack_entries([entry]), "seen": (0,)}
    (connection,) = strategies[1]._connections
    bad = PushMessage(connection.number, 1 + connection.sequence, rates=(0.0,), **message)
    if mode == "sync":
        match += "|do not form a step"
        innocent = pool.submit(lambda: sgd.apply_gradients([(np.ones(4), v)]).result(LIMIT_S))
        entering = strategies[1].sync_mode._start_entering(describe_step(sgd, 1.0, [(None, v)]))
        decision = entering.result(LIMIT_S)
        bad.step, bad.members = decision.step, decision.members
    with pytest.raises(errors.Error, match=match):
        connection.start("Push", bad.pack(), [np.zeros(4)]).result(LIMIT_S)
    if mode == "sync":
        with pytest.raises(errors.Error, match=match):
            innocent.result(LIMIT_S)
    np.testing.assert_array_equal(v, np.ones(4))
    connection._sequence += 1


def test_slices_out_of_order_are_refused(make):
    strategy = make().worker(0)
    (connection,) = strategy._connections
    with pytest.raises(errors.InternalError, match="got slice 3 of a push of worker 0, and expect"):
        connection.call("PushSlice", pb.SliceRequest(connection=connection.number, index=3))


def test_calls_that_wait_for_others_have_no_limit(make, pool, monkeypatch):
    """A late push must not be reported as failed, since the caller would push it again."""
    _, strategies, made = two_workers(make, pool)
    calls = []
    for strategy in strategies:
        own = strategy._host.endpoint
        call = own.call

        def watched(peer, method, *arguments, call=call, timeout=None, **options):
            calls.append((method, timeout))
            return call(peer, method, *arguments, timeout=timeout, **options)

        monkeypatch.setattr(own, "call", watched)
    push(optimizers.SGD(1.0), [(gradient(1.0), made[0][0])])
    assert {("ps/Push", float("inf")), ("ps/PushSlice", float("inf"))} <= set(calls)


def test_a_first_value_may_take_longer_than_a_call(make, pool, monkeypatch):
    cluster = make()
    strategies = [cluster.worker(index) for index in range(2)]
    monkeypatch.setattr(endpoint, "config", replace(settings, call_timeout_s=0.05))

    def slow(shape, dtype):
        threading.Event().wait(0.3)  # longer than a call may take
        return np.ones(shape, dtype)

    made = pool.map(lambda strategy: variable(strategy, "v", 3, slow), strategies)
    for v in made:
        np.testing.assert_array_equal(v, np.ones(3))


def test_a_worker_whose_initial_value_is_lost_lets_another_initialize(make, pool, monkeypatch):
    cluster = make()
    strategies = [cluster.worker(index) for index in range(2)]
    pushing, go_on, push_all = threading.Event(), threading.Event(), creation.push_all

    def lose_the_first(changes):
        if not pushing.is_set():
            pushing.set()
            go_on.wait(LIMIT_S)
            raise errors.InternalError("the push is lost")
        return push_all(changes)

    monkeypatch.setattr(creation, "push_all", lose_the_first)
    first = pool.submit(variable, strategies[0], "v", 3, "ones")
    assert pushing.wait(LIMIT_S)
    second = pool.submit(variable, strategies[1], "v", 3, "ones")
    go_on.set()
    with pytest.raises(errors.InternalError, match="the push is lost"):
        first.result(LIMIT_S)
    np.testing.assert_array_equal(second.result(LIMIT_S), np.ones(3))


@given(
    members=st.lists(st.integers(0, 2**32 - 1), max_size=4),
    sent=st.lists(st.integers(0, 2**64 - 1), max_size=4),
    changes=st.lists(
        st.tuples(
            st.tuples(
                st.integers(0, 2**32 - 1),
                st.integers(0, 2**32 - 1),
                st.sampled_from([0, 1, 2, 3]),
                st.integers(0, 13),
            ),
            st.integers(0, 2**64 - 1),
            st.floats(allow_nan=False),
        ),
        max_size=5,
    ),
)
def test_messages_are_read_as_they_were_written(members, sent, changes):
    entries, seen, rates = zip(*changes, strict=True) if changes else ((), (), ())
    packed = pack_entries(entries)
    assert unpack_entries(packed) == list(entries)
    message = PushMessage(7, 2**63, 3, 2**40, tuple(members), tuple(sent), packed, seen, rates)
    body = message.pack()
    assert PushMessage.unpack(body) == message
    for end in range(len(body)):
        with pytest.raises(errors.InvalidArgumentError, match="message of a push"):
            PushMessage.unpack(body[:end])
    assert unpack_reply(pack_reply(sent, sent)) == (tuple(sent), tuple(sent))
