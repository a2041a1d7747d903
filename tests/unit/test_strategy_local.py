"""Strategies in one plain process: with a Server, and in local mode without one."""

import contextlib
import copy
import gc
import json
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
from _cases.servers import Cluster, Host, variable

import mpidist
from mpidist import ClusterSpec
from mpidist.cluster_resolver import (
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from mpidist.errors import CancelledError, FailedPreconditionError, InvalidArgumentError
from strategy import (
    ParameterServerStrategy,
    Strategy,
    get_variable,
    optimizers,
    scopes,
    variable_scope,
)
from strategy.creation import Use
from strategy.server.parameter_server import LocalHost

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}


@pytest.fixture
def local(monkeypatch):
    """Close the endpoints of local mode after the test."""
    hosts = []
    start = LocalHost.__init__

    def note(host):
        start(host)
        hosts.append(host)

    monkeypatch.setattr(LocalHost, "__init__", note)
    scopes._local_strategy.cache_clear()
    yield
    scopes._local_strategy.cache_clear()
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

    def test_large_gradients(self):
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

    def test_an_evaluator_needs_no_server(self, monkeypatch):
        config = {"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "evaluator"}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        for arguments in (
            {"cluster_resolver": TFConfigClusterResolver()},
            {"cluster_spec": config["cluster"], "task_type": "evaluator"},
        ):
            assert ParameterServerStrategy(**arguments).num_workers == 1

    @pytest.mark.parametrize("described", [False, True])
    @pytest.mark.parametrize(
        "cluster", [{}, ClusterSpec({}), SimpleClusterResolver(ClusterSpec({}))]
    )
    def test_a_cluster_without_jobs_is_none(self, cluster, described, monkeypatch):
        if described:  # arguments take precedence over TF_CONFIG
            monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER}))
        strategy = ParameterServerStrategy(cluster)
        assert strategy.extended.parameter_devices == ("/device:CPU:0",)
        v = variable(strategy, "v", 2, 3.0)
        strategy.configure(cluster_spec={})
        np.testing.assert_array_equal(v, [3, 3])

    def test_tf_config_that_is_not_set_is_no_cluster(self, monkeypatch):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        assert ParameterServerStrategy(TFConfigClusterResolver()).num_workers == 1


@contextlib.contextmanager
def tasks_without_others():
    """Yield makers of the strategies of an evaluator and of a script without cluster."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack, servers=2)
        evaluator = Host(cluster, "evaluator", 0)

        def make(host, **options):
            return stack.enter_context(ParameterServerStrategy(server=host, **options))

        yield [lambda **o: make(evaluator, **o), lambda **o: make(None, **o)]


def step_of(strategy):
    """Return a variable's values after one step of SGD."""
    with strategy.scope():
        v = get_variable("v", 3, initializer=1.0)
    optimizers.SGD(1.0).apply_gradients([(np.full(3, 2.0), v)]).wait()
    return v.read_value().tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sync", "backup_workers": 1},
        {"mode": "ssp", "staleness": 0},
        {"parameter_devices": ["/job:ps/task:1"]},
        {"parameter_devices": ["/device:CPU:0"]},
        {"placement": lambda name, shape, dtype: 1},
        {"transport": "rma"},
        {"transport": "shared"},
        {"transport": "p2p"},
    ],
)
def test_options_that_need_other_tasks_have_no_effect_without_them(options):
    with tasks_without_others() as makes:
        for make in makes:
            strategy = make(**options)
            assert step_of(strategy) == [-1, -1, -1]
            assert strategy.extended.parameter_devices == ("/device:CPU:0",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sync", "backup_workers": -1}, "backup_workers must be from 0, not -1"),
        ({"backup_workers": 1}, "backup_workers are for mode 'sync'"),
        ({"mode": "ssp", "staleness": -1}, "staleness must be a number of steps"),
        ({"parameter_devices": []}, r"parameter_devices \[\] are not among"),
        ({"parameter_devices": ["/job:worker/task:0"]}, "parameter_devices .* are not among"),
        ({"parameter_devices": ["/job:ps/task:-1"]}, "parameter_devices .* are not among"),
        ({"parameter_devices": [""]}, "parameter_devices .* are not among"),
        (
            {"parameter_devices": ["/job:ps/task:1", "/job:ps/task:1/device:GPU:0"]},
            "name two devices of ps 1",
        ),
        ({"placement": lambda name, shape, dtype: -1}, "gives ps -1, and there are 1"),
        ({"placement": "best"}, "unknown placement 'best'"),
        ({"mode": "swift"}, "unknown mode 'swift'"),
    ],
)
def test_wrong_options_are_errors_in_local_mode_too(options, message):
    with tasks_without_others() as makes:
        for make in makes:
            with pytest.raises(ValueError, match=message):
                make(**options)


def test_an_evaluator_knows_the_ps_tasks_of_its_job():
    with tasks_without_others() as (evaluator, alone):
        with pytest.raises(ValueError, match=r"task:2'\] are not among .*CPU:0.*task:0.*task:1"):
            evaluator(parameter_devices=["/job:ps/task:2"])
        alone(parameter_devices=["/job:ps/task:2"])


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
        ParameterServerStrategy(**arguments).close()
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
    cluster = {"worker": ["localhost:0", "localhost:1"]}
    with pytest.raises(ValueError, match=r"the cluster has no ps task.*cluster_spec=\{\}"):
        ParameterServerStrategy(
            server=SimpleNamespace(
                cluster_spec=ClusterSpec(cluster), job_name="worker", task_index=0
            )
        )


@pytest.mark.parametrize("given", [{}, {"cluster_spec": {}}, {"cluster_resolver": {}}])
@pytest.mark.parametrize("job", ["local", "worker"])
def test_a_server_of_this_process_alone(job, given):
    server = mpidist.Server({job: ["localhost:0"]})
    with server, ParameterServerStrategy(**given) as strategy:
        assert strategy.extended.parameter_devices == ("/device:CPU:0",)
        with strategy.scope():
            v = get_variable("v", 3, initializer=7.0)
        v.assign_add(np.ones(3, np.float32))
        np.testing.assert_array_equal(v.numpy(), [8, 8, 8])


def test_without_jobs_a_strategy_is_of_this_process_alone():
    with mpidist.Server(CLUSTER, "worker", 0), ParameterServerStrategy(cluster_spec={}) as strategy:
        assert strategy.extended.parameter_devices == ("/device:CPU:0",)
        assert isinstance(strategy, Strategy)


def test_a_task_that_does_not_train():
    with (
        mpidist.Server(CLUSTER, "ps", 0),
        pytest.raises(ValueError, match="ps 0 does not train"),
    ):
        ParameterServerStrategy()


def test_an_evaluator_is_a_cluster_of_its_own(tmp_path):
    trainer = ParameterServerStrategy(server=LocalHost())
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
        one, two = ParameterServerStrategy(), ParameterServerStrategy(server=LocalHost())
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
    """Make a variable outside of any scope, though there is a cluster."""
    with pytest.warns(UserWarning, match="made outside of strategy.scope"):
        return get_variable(name, 1)


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
    with strategy.scope():
        v = get_variable("v", 2)
    for dumps, what in (
        (pickle.dumps, strategy),
        (pickle.dumps, v),
        (cloudpickle.dumps, v),
        (cloudpickle.dumps, lambda: v),
    ):
        with pytest.raises(TypeError, match="cannot be pickled: they belong to this process"):
            dumps(what)


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


@contextlib.contextmanager
def threads_end(within_s=0.0):
    """Check that the servers of local mode end with the block, or within ``within_s`` seconds."""
    before = set(threading.enumerate())
    yield
    new = [t for t in threading.enumerate() if t not in before and t.name.startswith("ps of ")]
    deadline = time.monotonic() + within_s
    while any(thread.is_alive() for thread in new) and time.monotonic() < deadline:
        # gc.collect() does nothing during a collection by another thread, such as an ending server.
        gc.collect()
        for thread in new:
            thread.join(0.02)
    assert not any(thread.is_alive() for thread in new)


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


LARGE = 32 << 18  # float32 elements of 32 MiB


class TestClose:
    def test_local_strategies_give_back_threads_and_memory(self):
        kept, resident = [], []
        with threads_end():
            for size in (5, *[LARGE] * 5):
                with ParameterServerStrategy() as strategy:
                    v = variable(strategy, "v", size, "ones", np.float32)
                    optimizer = optimizers.Adam(0.1)
                    optimizer.apply_gradients([(np.ones(size, np.float32), v)])
                kept.append((strategy, v, optimizer))
                resident.append(resident_mib())
        assert resident[-1] - resident[0] < 64  # MiB; a leak takes 5 x 96; the first one loads code

    def test_local_strategies_end_as_garbage(self):
        before = resident_mib()
        with threads_end(within_s=10):
            for _ in range(6):
                variable(ParameterServerStrategy(), "v", LARGE, "ones", np.float32)
        assert resident_mib() - before < 64  # MiB; a leak takes 6 x 32

    def test_a_cluster_that_comes_later_ends_local_mode(self):
        with threads_end():
            strategy = ParameterServerStrategy()
            with mpidist.Server(CLUSTER, "worker", 0):
                strategy.configure(cluster_spec=CLUSTER)

    def test_nothing_can_be_used_afterwards(self, tmp_path):
        strategy = ParameterServerStrategy()
        v = variable(strategy, "v", 40_000)
        optimizer = optimizers.SGD(1.0)
        optimizer.apply_gradients([(np.ones(40_000), v)])
        strategy.close()
        strategy.close()
        strategy.finish()
        for use in (
            v.read_value,
            lambda: v.gather([1, 2]),
            lambda: v.assign(1),
            lambda: v.scatter_add([0], 1.0),
            lambda: optimizer.apply_gradients([(np.ones(40_000), v)]),
            lambda: int(strategy.global_step),
            lambda: strategy.run(lambda: 1),
            lambda: strategy.save(str(tmp_path)),
            lambda: strategy.creator.create("w", (2,), np.float32, "zeros", Use()),
            lambda: strategy.configure(cluster_spec=CLUSTER),
            lambda: strategy.scope().__enter__(),
        ):
            with pytest.raises(FailedPreconditionError, match="the strategy has been closed"):
                use()

    def test_what_is_given_stays_open(self):
        host = LocalHost()
        for number in range(2):
            with ParameterServerStrategy(server=host) as strategy, variable_scope(str(number)):
                assert variable(strategy, "v", 2).assign_add(1) == 2
        host.close()

    def test_in_a_cluster_the_servers_keep_variables(self):
        with mpidist.Server(CLUSTER, "worker", 0):
            with ParameterServerStrategy() as strategy:
                v = variable(strategy, "v", 400_000)
                works = [
                    optimizers.SGD(1.0).apply_gradients([(np.ones(400_000), v)]) for _ in range(3)
                ]
            assert all(work.is_success() for work in works)
            with pytest.raises(FailedPreconditionError, match="the strategy has been closed"):
                v.read_value()
            with ParameterServerStrategy() as other:
                np.testing.assert_array_equal(variable(other, "v", 400_000)[:3], [-3, -3, -3])

    @pytest.mark.parametrize("fails", [False, True])
    def test_others_do_not_wait_for_who_has_closed(self, fails):
        with contextlib.ExitStack() as stack:
            cluster = Cluster(stack)
            first, second = (cluster.worker(index, mode="sync") for index in range(2))
            own, v = (variable(strategy, "v", 3) for strategy in (first, second))
            with contextlib.suppress(KeyError), first:
                np.testing.assert_array_equal(own, [0, 0, 0])
                if fails:
                    raise KeyError
            optimizers.SGD(1.0).apply_gradients([(np.ones(3), v)]).wait()
            np.testing.assert_array_equal(v, [-1, -1, -1])

    @pytest.mark.parametrize(
        ("own", "seen"), [(ZeroDivisionError, ZeroDivisionError), (None, InvalidArgumentError)]
    )
    def test_an_error_of_the_block_hides_that_of_a_push(self, own, seen):
        def train():
            with ParameterServerStrategy() as strategy:
                v = variable(strategy, "v", 3)
                optimizers.SGD(lambda step: {}["rate"]).apply_gradients([(np.ones(3), v)])
                if own is not None:
                    raise own

        with threads_end(), pytest.raises(seen):
            train()
