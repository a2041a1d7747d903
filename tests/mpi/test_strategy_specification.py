"""The specification of ParameterServerStrategy, sentence by sentence.

The members that end in ``_dyn``, ``PythonObject`` and ``IParameterServerStrategy`` belong to the
binding of another language. A resolver reads the cluster of TF_CONFIG.
"""

import warnings

import numpy as np
import pytest
from _cases.clusters import on_cluster, spec_of

import mpidist
from mpidist import ClusterSpec
from strategy import (
    GreedyLoadBalancingStrategy,
    ParameterServerStrategy,
    byte_size_load_fn,
    get_replica_context,
    get_variable,
    optimizers,
)

REPLICAS = 2
pytestmark = pytest.mark.ranks(4)


def on_two_workers(world, train, **options):
    """Run a function on two ps tasks and two workers of two replicas."""
    return on_cluster(world, 2, train, num_replicas_per_worker=REPLICAS, **options)


def test_without_a_cluster_it_is_local_training(world):
    """Keep variables on the local CPU. No other process takes part."""
    if world.rank:
        return
    strategy = ParameterServerStrategy()
    assert strategy.extended.parameter_devices == ("/device:CPU:0",)
    assert strategy.num_workers == 1
    with strategy.scope():
        v = get_variable("v", 3, initializer=2.0)
    assert strategy.run(lambda: v.assign_add(1)) == 2
    np.testing.assert_array_equal(v, [3, 3, 3])


@pytest.mark.parametrize(
    ("ps", "options"),
    [
        (1, {"mode": "sync", "backup_workers": 1}),
        (2, {"parameter_devices": ["/job:ps/task:1"], "mode": "ssp", "staleness": 2}),
        (2, {"placement": lambda name, shape, dtype: len(shape) % 2}),
        (2, {"placement": GreedyLoadBalancingStrategy(2, byte_size_load_fn)}),
    ],
)
def test_an_evaluator_runs_the_script_of_the_workers(world, ps, options):
    """Run an evaluator as a cluster of its own. Options that need other tasks have no effect."""
    tasks = spec_of(world, ps).as_dict()
    spec = ClusterSpec({**tasks, "evaluator": [tasks["worker"].pop()]})
    job, task = spec.task_of(world.rank)
    with mpidist.Server(spec, job, task) as server:
        if job == "ps":
            server.join()
            return
        with ParameterServerStrategy(spec, **options) as strategy, strategy.scope():
            v = get_variable("v", 3, initializer=1.0)
            optimizers.SGD(1.0).apply_gradients([(np.ones(3), v)]).wait()
            value = v.read_value()
        if job == "evaluator":
            np.testing.assert_array_equal(value, [0, 0, 0])
            assert strategy.num_workers == 1
        else:
            assert value.max() <= 0


def test_variables_and_their_updates_are_on_parameter_servers(world):
    """Run operations on workers. All workers agree on the server of each variable."""

    def train(strategy, workers):
        strategy.run(lambda: [get_variable(name, 10, initializer=0.0) for name in "abcd"])
        by_name = strategy.creator.by_name
        places = strategy.extended.parameter_devices
        connections = strategy._connections
        where = {
            name: places[connections.index(v.remotes[0].connection)] for name, v in by_name.items()
        }
        views = [None] * workers.size()
        workers.all_gather_object(views, where)
        return views, strategy.extended.worker_devices, strategy.worker_index

    result = on_two_workers(world, train)
    if result is not None:
        views, devices, index = result
        assert views[0] == views[1]
        assert set(views[0].values()) == {"/job:ps/task:0", "/job:ps/task:1"}
        assert devices == tuple(f"/job:worker/task:{index}/device:CPU:{n}" for n in range(REPLICAS))


def test_operations_are_replicated_and_variables_are_not(world):
    """Share the variables of get_variable between replicas. A worker has its own replicas."""

    def train(strategy, workers):
        def step():
            replica = get_replica_context().replica_id_in_sync_group
            return get_variable("v", 4, initializer=1.0), replica

        variables, replicas = strategy.run(step)
        assert len({id(v) for v in strategy.unwrap(variables)}) == 1
        assert strategy.unwrap(replicas) == tuple(range(REPLICAS))
        assert strategy.num_replicas_in_sync == REPLICAS
        workers.barrier()
        if strategy.is_chief:
            variables.assign(5)
        workers.barrier()
        return variables.read_value()

    result = on_two_workers(world, train)
    if result is not None:
        np.testing.assert_array_equal(result, np.full(4, 5))


def test_one_update_for_all_replicas_and_workers_by_themselves(world):
    """Compute a single gradient update across the replicas of a worker, in step.

    Workers proceed asynchronously. Operations that happen once, such as the increment of
    the global step, happen once on every worker.
    """
    steps = 7

    def train(strategy, workers):
        with strategy.scope():
            v = get_variable("v", 4, np.float64, 0.0)
        optimizer = optimizers.SGD(1.0)
        count = steps if strategy.is_chief else 2 * steps  # no worker waits for the other

        def step():
            replica = get_replica_context().replica_id_in_sync_group
            return optimizer.apply_gradients([(np.full(4, 1.0 + 2 * replica), v)])

        for _ in range(count):
            strategy.group(strategy.run(step))
        workers.barrier()
        return v.read_value(), int(strategy.global_step)

    result = on_two_workers(world, train)
    if result is not None:
        value, step = result
        np.testing.assert_array_equal(value, np.full(4, -2.0 * 3 * steps))
        assert step == 3 * steps


@pytest.mark.parametrize("replicas", [1, 2])
def test_call_for_each_replica(world, replicas):
    """Call a function for each replica, even if there is only one."""

    def train(strategy, workers):
        call = strategy.call_for_each_replica
        seen = call(lambda x: (x, get_replica_context().num_replicas_in_sync), ("x",))
        return [strategy.unwrap(part) for part in seen]

    result = on_cluster(world, 2, train, num_replicas_per_worker=replicas)
    if result is not None:
        assert result == [("x",) * replicas, (replicas,) * replicas]


def test_device_scopes_do_not_move_variables(world):
    """Merge device scopes with the replica's device for operations only."""

    def train(strategy, workers):
        with strategy.scope(), strategy.device("CPU:1") as device:
            v = get_variable("v", 4, initializer=0.0)
        return device, v.assign_add(1), v.read_value(), strategy.worker_index, workers.barrier()

    result = on_two_workers(world, train)
    if result is not None:
        device, version, value, index, _ = result
        assert device == f"/job:worker/task:{index}/device:CPU:1"
        assert version in (2, 3)
        assert set(value) <= {1, 2}


def test_colocation(world):
    """Warn about a colocation scope. Only extended.colocate_vars_with places variables together."""

    def train(strategy, workers):
        with strategy.scope():
            first, second = (get_variable(name, 1000) for name in "ab")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with strategy.colocate_with(second):
                    pass
            with strategy.extended.colocate_vars_with(second):
                beside = get_variable("c", 1000)
        assert first.remotes[0].connection is not second.remotes[0].connection
        assert beside.remotes[0].connection is second.remotes[0].connection
        return [str(one.message) for one in caught]

    result = on_two_workers(world, train)
    if result is not None:
        (message,) = result
        assert "colocate_vars_with" in message
