"""Strategies in one plain process: with a Server, and in local mode without one."""

import copy
import json
import threading

import numpy as np
import pytest

import mpidist
from mpidist import ClusterSpec
from mpidist.cluster_resolver import MPIClusterResolver
from mpidist.errors import CancelledError, FailedPreconditionError
from strategy import (
    ParameterServerStrategy,
    get_variable,
    optimizers,
    parameter_server_strategy,
    variable_creation,
)

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}


@pytest.fixture
def local(monkeypatch):
    """What local mode makes is closed after the test."""
    hosts = []
    make = parameter_server_strategy.local_host

    def note():
        hosts.append(make())
        return hosts[-1]

    for module in (parameter_server_strategy, variable_creation):
        monkeypatch.setattr(module, "local_host", note)
    variable_creation._local_strategy.cache_clear()
    yield
    variable_creation._local_strategy.cache_clear()
    for host in hosts:
        host.endpoint.close()


@pytest.fixture
def server():
    with mpidist.Server(CLUSTER, "worker", 0) as server:
        yield server


@pytest.mark.usefixtures("local")
class TestLocalMode:
    def test_a_variable_without_scope_and_cluster(self):
        v, w = get_variable("v", 3, initializer="ones"), get_variable("w", (), int, "zeros")
        assert v.strategy is w.strategy
        optimizers.SGD(0.5).apply_gradients([(np.ones(3), v)])
        v.assign_add(np.arange(3))
        np.testing.assert_array_equal(v, [0.5, 1.5, 2.5])

    def test_strategies_do_not_meet(self):
        one, two = ParameterServerStrategy(), ParameterServerStrategy()
        made = []
        for strategy, names in ((one, "ab"), (two, "ba")):
            with strategy.scope():
                made += [get_variable(name, 2, initializer=len(made)) for name in names]
        outside = get_variable("a", 5, initializer=9.0)
        for number, v in enumerate(made):
            v.assign_add(0.5)
            np.testing.assert_array_equal(v, np.full(2, 2 * (number // 2) + 0.5))
        np.testing.assert_array_equal(outside, np.full(5, 9.0))

    def test_the_strategy_is_chief_of_one(self):
        strategy = ParameterServerStrategy()
        assert strategy.is_chief
        assert (strategy.worker_index, strategy.num_workers) == (0, 1)
        assert strategy.num_replicas_in_sync == 1

    def test_large_gradients_go_through_the_ring(self):
        v = get_variable("v", 500_000, initializer="zeros")
        grad = np.arange(500_000, dtype=np.float32)
        optimizers.SGD(1.0).apply_gradients([(grad, v)])
        np.testing.assert_array_equal(v, -grad)

    def test_a_cluster_needs_a_server(self):
        for cluster in (CLUSTER, ClusterSpec(CLUSTER)):
            with pytest.raises(FailedPreconditionError, match=r"start mpidist\.Server"):
                ParameterServerStrategy(cluster)

    def test_a_cluster_in_tf_config_counts_as_given(self, monkeypatch):
        for task, starts in (("worker", False), ("evaluator", True)):
            config = {"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": task}}
            monkeypatch.setenv("TF_CONFIG", json.dumps(config))
            if starts:
                assert ParameterServerStrategy().num_workers == 1
                continue
            with pytest.raises(FailedPreconditionError, match=r"TF_CONFIG.*start mpidist\.Server"):
                ParameterServerStrategy()
        monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["b:1"]}}')
        assert ParameterServerStrategy().is_chief


def test_the_cluster_may_be_given_in_many_ways(server):
    resolver = MPIClusterResolver({"ps": 1, "worker": 1})
    spec = ClusterSpec(CLUSTER)
    for arguments in (
        {},
        {"cluster_resolver": CLUSTER},
        {"cluster_resolver": spec},
        {"cluster_spec": spec.as_cluster_def()},
        {"task_type": "worker", "task_id": 0},
        {"server": server},
    ):
        ParameterServerStrategy(**arguments)
    server.stop()
    with mpidist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id):
        ParameterServerStrategy(resolver)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transport": "carrier"}, r"unknown transport 'carrier'.*auto.*shared.*p2p"),
        ({"cluster_resolver": CLUSTER, "cluster_spec": CLUSTER}, "not both"),
        ({"cluster_spec": {"ps": ["a:1"], "worker": ["b:2"]}}, "the started Server is of"),
        ({"task_type": "chief"}, "task_type is 'chief', and that of the started Server 'worker'"),
        ({"task_id": 1}, "task_id is 1, and that of the started Server 0"),
    ],
)
@pytest.mark.usefixtures("server")
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParameterServerStrategy(**arguments)


def test_a_cluster_without_ps():
    with (
        mpidist.Server({"worker": ["localhost:0"]}),
        pytest.raises(ValueError, match="the cluster has no ps task"),
    ):
        ParameterServerStrategy()


def test_a_task_that_does_not_train():
    with (
        mpidist.Server(CLUSTER, "ps", 0),
        pytest.raises(ValueError, match="ps 0 does not train"),
    ):
        ParameterServerStrategy()


def test_an_evaluator_is_a_cluster_of_its_own(tmp_path):
    trainer = ParameterServerStrategy(server=_local())
    with trainer.scope():
        get_variable("v", 3, initializer=7.0)
    path = trainer.save(str(tmp_path))
    with mpidist.Server({**CLUSTER, "evaluator": ["localhost:0"]}, "evaluator", 0):
        strategy = ParameterServerStrategy()
        assert strategy.is_chief
        assert strategy.extended.parameter_devices == ("/device:CPU:0",)
        with strategy.scope():
            v = get_variable("v", 3, initializer=0.0)
        strategy.restore(path)
        np.testing.assert_array_equal(v, [7, 7, 7])


@pytest.mark.usefixtures("server", "local")
class TestScope:
    def test_scopes_nest(self):
        one, two = ParameterServerStrategy(), ParameterServerStrategy(server=_local())
        with one.scope() as opened:
            assert opened is one
            with two.scope():
                inner = get_variable("v", 1)
                assert two.run(lambda: get_variable("r", 1)).strategy is two
                assert one.run(lambda: get_variable("r", 1)).strategy is one
            outer = get_variable("v", 1)
        assert (inner.strategy, outer.strategy) == (two, one)
        assert outside("v").strategy not in (one, two)

    def test_a_scope_ends_with_an_error(self):
        strategy = ParameterServerStrategy()

        def fail():
            with strategy.scope():
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert outside("v").strategy is not strategy

    def test_a_scope_is_of_its_thread(self):
        strategy = ParameterServerStrategy()
        made = []
        with strategy.scope():
            thread = threading.Thread(target=lambda: made.append(outside("v")))
            thread.start()
            thread.join(30)
        assert made[0].strategy is not strategy

    def test_run(self):
        strategy = ParameterServerStrategy()
        assert strategy.run(lambda a, b: (a, b), (1,), {"b": 2}) == (1, 2)
        assert strategy.run(lambda: 3) == 3


def outside(name):
    """A variable made outside of any scope, though there is a cluster."""
    with pytest.warns(UserWarning, match="made outside of strategy.scope"):
        return get_variable(name, 1)


def _local():
    return parameter_server_strategy.local_host()


@pytest.mark.usefixtures("server")
def test_the_global_step_counts_applied_gradients():
    strategy = ParameterServerStrategy()
    with strategy.scope():
        v, w = get_variable("v", 2), get_variable("w", 2)
    optimizer = optimizers.SGD(0.1)
    assert (strategy.global_step.dtype, strategy.global_step.shape) == (np.int64, ())
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(2), v), (np.ones(2), w)])
    v.assign(1)
    assert int(strategy.global_step) == 3


@pytest.mark.usefixtures("server")
def test_a_strategy_cannot_be_copied():
    strategy = ParameterServerStrategy()
    for make, what in (
        (copy.copy, strategy),
        (copy.deepcopy, strategy),
        (copy.deepcopy, {"model": [strategy]}),
    ):
        with pytest.raises(RuntimeError, match="cannot be copied"):
            make(what)


class Sharded(list):
    def shard(self, count, index):
        return Sharded(self[index::count])


@pytest.mark.usefixtures("server")
def test_datasets_of_one_worker():
    strategy = ParameterServerStrategy()
    plain, sharded = [1, 2, 3], Sharded([1, 2, 3])
    assert strategy.experimental_distribute_dataset(plain) is plain
    assert list(strategy.experimental_distribute_dataset(sharded)) == [1, 2, 3]
    assert list(strategy.experimental_distribute_dataset(iter(plain))) == [1, 2, 3]


def test_leaving_the_server_drains():
    with mpidist.Server(CLUSTER, "worker", 0):
        with ParameterServerStrategy().scope():
            v = get_variable("v", 400_000, initializer="zeros")
        optimizer = optimizers.SGD(1.0)
        works = [optimizer.apply_gradients([(np.ones(400_000), v)]) for _ in range(5)]
    assert all(work.is_success() for work in works)
    assert works[-1].result().versions == (6,)
    with pytest.raises((CancelledError, FailedPreconditionError)):
        v.assign(1)
