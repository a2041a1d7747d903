"""A parameter server and several workers, as threads and endpoints of one process."""

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from _cases.footprint import memory_growth
from _cases.servers import Cluster, variable

from mpidist import errors, host_memory
from mpidist.ps_memory import Segment
from strategy import get_variable, optimizers
from strategy.client.connection import definition
from strategy.partitioners import FixedShardsPartitioner
from strategy.proto import parameter_server_pb2 as pb


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


@pytest.mark.parametrize("near", [True, False])
def test_workers_share_variables(make, near):
    cluster = make(near=near)
    one, two = (variable(cluster.worker(i), "v", 5000, i) for i in range(2))
    np.testing.assert_array_equal(two, np.zeros(5000))
    one.assign_add(1)
    two.assign_add(2)
    np.testing.assert_array_equal(one, np.full(5000, 3))
    assert (one.version, two.version) == (3, 3)


def test_a_second_worker_waits_for_the_first_value(make):
    cluster = make()
    strategies = [cluster.worker(i) for i in range(2)]
    got, threads = [], []

    def first_value(shape, dtype):
        thread = threading.Thread(
            target=lambda: got.append(variable(strategies[1], "v", 3, 1 / 3).read_value())
        )
        threads.append(thread)
        thread.start()
        return np.arange(3.0)

    variable(strategies[0], "v", 3, first_value)
    threads[0].join(30)
    np.testing.assert_array_equal(got, [[0, 1, 2]])


def test_a_second_strategy_of_a_worker_waits_for_the_first_value(make):
    cluster = make()
    strategies = [cluster.worker(0) for _ in range(2)]
    got, threads = [], []

    def first_value(shape, dtype):
        create = threading.Thread(
            target=lambda: got.append(variable(strategies[1], "v", 3, -1).read_value())
        )
        threads.append(create)
        create.start()
        served = cluster.parameter_servers[0]._store.by_name["v"]
        deadline = time.monotonic() + 30
        while create.is_alive() and not served.waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        return np.arange(3.0)

    variable(strategies[0], "v", 3, first_value)
    threads[0].join(30)
    np.testing.assert_array_equal(got, [[0, 1, 2]])


def test_the_first_value_of_an_empty_variable(make):
    cluster = make()
    for index in range(2):
        v = variable(cluster.worker(index), "v", (0, 3))
        assert v.read_value().shape == (0, 3)
        assert v.assign(np.zeros((0, 3))) == index + 2


@pytest.mark.parametrize("other", [{"shape": 4}, {"dtype": np.float32}], ids=str)
def test_workers_that_create_otherwise(make, other):
    cluster = make()
    first, second = cluster.worker(0), cluster.worker(1)
    variable(first, "v", 3)
    with pytest.raises(errors.InvalidArgumentError) as info:
        variable(second, **({"name": "v", "shape": 3} | other))
    for part in ("worker 1 creates variable 'v' as", "worker 0 created it as float64[3]"):
        assert part in info.value.message
    assert variable(second, "v", 3).assign_add(1) == 2


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_workers_create_in_any_order(make, servers):
    cluster = make(servers=servers)
    first, second = cluster.worker(0), cluster.worker(1)
    made = {name: variable(first, name, 1000) for name in "abc"}
    for name in "cdab":
        if name == "d":
            variable(second, name, 10)
            continue
        made[name].assign_add(1)
        other = variable(second, name, 1000)
        np.testing.assert_array_equal(other, np.ones(1000))
        assert other.remotes[0].connection.index == made[name].remotes[0].connection.index


def test_staleness_counts_the_changes_of_others(make):
    cluster = make()
    one, two = (variable(cluster.worker(i), "v", 10) for i in range(2))
    optimizer = optimizers.SGD(1.0)

    def push(v):
        return optimizer.apply_gradients([(np.ones(10), v)]).result().staleness[0]

    one.read_value()
    two.read_value()
    assert [push(one), push(one)] == [0, 0]
    assert push(two) == 2
    assert push(two) == 2
    two.read_value()
    assert push(two) == 0
    assert push(one) == 3


@pytest.mark.parametrize("near", [True, False])
def test_pushes_over_several_servers_keep_their_order(make, near):
    cluster = make(servers=3, workers=1, near=near)
    strategy = cluster.worker(0)
    shapes = [300_000, 10, 20, 5000, 30, 200_000]
    made = [variable(strategy, f"v{n}", size) for n, size in enumerate(shapes)]
    assert len({id(v.remotes[0].connection) for v in made}) == 3
    for n, v in enumerate(made):
        for _ in range(n):
            v.assign_add(1)
    work = optimizers.SGD(1.0).apply_gradients([(np.full(v.shape, 2.0), v) for v in made])
    assert work.result().versions == tuple(n + 2 for n in range(len(made)))
    for n, v in enumerate(made):
        np.testing.assert_array_equal(v, np.full(v.shape, n - 2))


def test_two_workers_push_large_gradients_at_once(make):
    cluster = make()
    made = [variable(cluster.worker(i), "v", 400_000) for i in range(2)]
    optimizer = optimizers.SGD(1.0)

    def train(v):
        for _ in range(10):
            optimizer.apply_gradients([(np.ones(400_000), v)])
            value = v.read_value()
            assert value.min() == value.max()

    threads = [threading.Thread(target=train, args=(v,)) for v in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    np.testing.assert_array_equal(made[0], np.full(400_000, -20))
    assert made[0].version == 21


def test_a_pull_while_a_push_stands_still_asks_the_server(make):
    cluster = make()
    one, two = (variable(cluster.worker(i), "v", 10) for i in range(2))
    one.assign(4)
    versions = one.remotes[0].shared.versions
    versions[0] += 1  # as while the server changes the block
    np.testing.assert_array_equal(two.read_value(), np.full(10, 4))
    versions[0] -= 1


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_another_number_of_servers(make, tmp_path, before, after):
    values = [np.full(size, float(size)) for size in (1000, 10, 5, 3000)]
    for servers, path in ((before, None), (after, str(tmp_path / "step-0"))):
        strategy = make(servers=servers, workers=1).worker(0)
        made = [variable(strategy, f"v{n}", v.shape) for n, v in enumerate(values)]
        if path is None:
            for v, value in zip(made, values, strict=True):
                v.assign(value)
            strategy.save(str(tmp_path))
        else:
            strategy.restore(path)
    for v, value in zip(made, values, strict=True):
        np.testing.assert_array_equal(v, value)


@pytest.mark.parametrize("near", [True, False])
def test_variables_in_private_memory_are_served_by_messages(make, near, monkeypatch):
    cluster = make(near=near)
    strategies = [cluster.worker(index) for index in range(2)]
    allocate = cluster.memory.allocate
    private = lambda nbytes: Segment(allocate(nbytes).memory, b"")  # noqa: E731
    monkeypatch.setattr(cluster.memory, "allocate", private)
    made = [variable(strategy, "large", 1 << 22, 3) for strategy in strategies]
    small = variable(strategies[0], "small", 1 << 9)
    assert [v.remotes[0].shared for v in made] == [None, None]
    assert (small.remotes[0].shared is not None) == near
    ones = np.ones(1 << 22)
    optimizers.SGD(1.0).apply_gradients([(ones, made[0]), (np.ones(1 << 9), small)])
    made[1].assign_add(np.arange(1 << 22))
    made[0].read_value()
    np.testing.assert_array_equal(made[1], np.arange(1 << 22) + 2.0)
    np.testing.assert_array_equal(small, np.full(1 << 9, -1))


def test_shared_memory_that_cannot_be_mapped(make, monkeypatch):
    cluster = make()
    strategy = cluster.worker(0, transport="shared")
    monkeypatch.setattr(cluster.memory, "map", lambda *_: None)
    with pytest.raises(errors.FailedPreconditionError, match="worker 0 cannot map the memory of p"):
        variable(strategy, "v", 3)
    assert variable(cluster.worker(1), "v", 3, "ones").numpy().tolist() == [1.0] * 3


@pytest.mark.parametrize("transport", ["auto", "shared", "rma", "p2p"])
def test_workers_with_different_transports(make, transport):
    cluster = make()
    strategies = cluster.worker(0, transport="rma"), cluster.worker(1, transport=transport)
    made = [variable(strategy, "v", 3) for strategy in strategies]
    for v in made:
        v.assign_add(1)
    assert [v.numpy().tolist() for v in made] == [[2.0] * 3] * 2


def test_strategies_have_variables_of_their_own_on_several_servers(make):
    cluster = make(servers=2)
    one, other = cluster.worker(0), cluster.worker(0)
    assert variable(one, "a", 3, "ones").read_value().tolist() == [1] * 3
    assert variable(other, "b", 5, "ones").read_value().tolist() == [1] * 5
    assert variable(other, "c", 2, "zeros").read_value().tolist() == [0] * 2
    assert variable(one, "d", 1, "zeros").read_value().tolist() == [0]


def test_shared_memory_that_there_is_not(make):
    cluster = make(near=False)
    with pytest.raises(errors.FailedPreconditionError, match="another node than worker 1"):
        cluster.worker(1, transport="shared")


def test_what_a_server_refuses(make):
    cluster = make()
    strategy = cluster.worker(0)
    address = cluster.servers[0].endpoint.address
    endpoint = strategy.global_step.remotes[0].connection._host.endpoint

    def configure(optimizer):
        body = pb.ConfigureRequest(optimizer=optimizer).SerializeToString()
        return endpoint.call(address, "ps/Configure", body).result(30)

    with pytest.raises(errors.UnimplementedError, match=r"ps 0 has no optimizer 'Magic'.*Adam"):
        configure(pb.OptimizerDef(kind="Magic"))
    for values, problem in (
        ({"l1": -1.0}, "Ftrl: l1 must not be negative"),
        ({"l3": 1.0}, "Ftrl: .* unexpected keyword argument 'l3'"),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=problem):
            configure(pb.OptimizerDef(kind="Ftrl", name="Ftrl", values=values))
    rules = [
        pb.ConfigureReply.FromString(configure(definition(optimizer)).body).rule
        for optimizer in (optimizers.SGD(), optimizers.Adam(), optimizers.SGD())
    ]
    assert rules[0] == rules[2] != rules[1]
    assert min(rules) >= pb.FIRST_OPTIMIZER


def test_an_optimizer_of_one_worker_outlives_its_equal_of_another(make):
    cluster = make()
    strategies = [cluster.worker(i) for i in range(2)]
    mine, yours = (variable(one, "v", 3, "zeros") for one in strategies)

    def push(optimizer, target):
        optimizer.apply_gradients([(np.ones(3), target)]).wait()

    kept = optimizers.SGD(1.0)
    push(kept, yours)
    for _ in range(3):  # the old optimizer is dropped when the next one is registered
        push(optimizers.SGD(1.0), mine)
        push(optimizers.Adam(0.0), mine)
    push(kept, yours)
    np.testing.assert_array_equal(yours, np.full(3, -5.0))
    strategies[0].close()
    push(kept, yours)
    np.testing.assert_array_equal(yours, np.full(3, -6.0))


def test_a_closed_strategy_leaves_no_rules_on_the_ps(make):
    """Their schedules hold 100 KB each, so that a rule that stays shows in the memory."""
    cluster = make()

    def train(number):
        rates = np.full(12_500, 0.1 / (1 + number))
        strategy = cluster.worker(0)
        sgd = optimizers.SGD(lambda step: float(rates[step]), name="sgd")
        sgd.apply_gradients([(np.ones(3), variable(strategy, "v", 3, "zeros"))]).wait()
        strategy.close()

    assert memory_growth(train, 60) < 3e6


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("waits", [True, False])
def test_a_first_value_that_fails_is_left_to_the_next_worker(make, order, waits):
    cluster = make()
    first, second = (cluster.worker(index) for index in order)
    begun, made = threading.Event(), []

    def broken(shape, dtype):
        if waits:
            threading.Thread(target=follow, daemon=True).start()
            assert begun.wait(30)
        raise ZeroDivisionError

    def follow():
        begun.set()
        made.append(variable(second, "v", 3, "ones"))

    with pytest.raises(ZeroDivisionError):
        variable(first, "v", 3, broken)
    if not waits:
        follow()
    again = variable(first, "v", 3, "zeros")
    deadline = time.monotonic() + 30
    while not made:
        assert time.monotonic() < deadline
    for v in (*made, again):
        assert v.numpy().min() == v.numpy().max() == made[0].numpy()[0]
    if not waits:
        np.testing.assert_array_equal(again, np.ones(3))


def test_a_first_value_is_no_change_by_others(make):
    cluster = make()
    variable(cluster.worker(0), "v", 2)
    v = variable(cluster.worker(1), "v", 2)
    assert optimizers.SGD().apply_gradients([(np.ones(2), v)]).result().staleness == (0,)


@pytest.mark.parametrize("size", [1000, 100_000])  # in a bucket, and alone
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_no_memory_for_what_an_optimizer_keeps(make, monkeypatch, size, dtype):
    weight = variable(make().worker(0), "v", size, "ones", dtype)
    adam, ones = optimizers.Adam(1.0), np.ones(size, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "free_memory", lambda: (0, "container or batch job"))
        with pytest.raises(errors.ResourceExhaustedError, match="beside variable 'v': the contai"):
            adam.apply_gradients([(ones, weight)]).wait()
    np.testing.assert_array_equal(weight, np.ones(size))
    adam.apply_gradients([(ones, weight)]).wait()
    np.testing.assert_allclose(weight, np.zeros(size), atol=1e-3)


def test_no_memory_for_one_more_variable(make, monkeypatch):
    strategy = make().worker(0)
    first = variable(strategy, "v", 1000, "ones")
    monkeypatch.setattr(host_memory, "free_memory", lambda: (1 << 10, "host"))
    with pytest.raises(errors.ResourceExhaustedError, match="no room for variable 'w' of 24000"):
        variable(strategy, "w", 3000, "ones")
    np.testing.assert_array_equal(first, np.ones(1000))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_variable_that_could_not_be_made_leaves_its_place(make, servers, parts):
    cluster = make(servers=servers)
    first, second = cluster.worker(0), cluster.worker(1)
    divide = FixedShardsPartitioner(parts)

    def create(strategy, name, initializer="ones"):
        with strategy.scope():
            return get_variable(name, 6, np.float64, initializer, partitioner=divide)

    made = [create(first, "a")]
    with pytest.raises(ValueError, match="has shape"):
        create(first, "b", np.ones(4))
    made.append(create(first, "c"))
    for strategy in (first, second):
        others = [create(second, name) for name in "ac"] if strategy is second else made
        for v in others:
            np.testing.assert_array_equal(v, np.ones(6))


def test_a_failed_initializer_does_not_spoil_checkpoints(make, tmp_path):
    cluster = make(servers=2)
    strategy = cluster.worker(0)

    def broken(shape, dtype):
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        variable(strategy, "v", 1000, broken)
    variable(strategy, "large", 100_000)
    path = strategy.save(str(tmp_path / "first"))
    v = variable(strategy, "v", 1000, "ones")
    later = strategy.save(str(tmp_path / "second"))
    v.assign(5)
    with pytest.raises(errors.NotFoundError, match=r"does not have \['v'\]"):
        strategy.restore(path)
    strategy.restore(later)
    np.testing.assert_array_equal(v, np.ones(1000))


def test_workers_that_find_no_room_may_divide_the_variable(make, monkeypatch):
    cluster = make()
    strategies = [cluster.worker(index) for index in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "free_memory", lambda: (1 << 20, "host"))
        for strategy in strategies:
            with pytest.raises(errors.ResourceExhaustedError):
                variable(strategy, "v", 1 << 20)
    for strategy in strategies:
        with strategy.scope():
            parts = FixedShardsPartitioner(4)
            v = get_variable("v", 1 << 20, np.float64, "ones", partitioner=parts)
        assert len(v.remotes) == 4


def test_strategies_on_different_servers_save(make, tmp_path):
    cluster = make(servers=2)
    one = cluster.worker(0, parameter_devices=["/job:ps/task:1"])
    other = cluster.worker(0)
    v, w = variable(one, "v", 4), variable(other, "w", 4)
    for _ in range(5):
        optimizers.SGD(1.0).apply_gradients([(np.ones(4), w)]).wait()
    optimizers.SGD(1.0).apply_gradients([(np.ones(4), v)]).wait()
    path = one.save(str(tmp_path))
    v.assign(3)
    one.restore(path)
    np.testing.assert_array_equal(v, np.full(4, -1.0))
