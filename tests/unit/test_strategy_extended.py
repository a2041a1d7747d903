"""The finer interface of a strategy, its devices, its input, and scopes of variables."""

import warnings
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from _cases.servers import Cluster

import mpidist
from mpidist import ClusterSpec
from mpidist.errors import FailedPreconditionError
from mpidist.proto import mpidist_pb2
from strategy import (
    AUTO_REUSE,
    ParameterServerStrategy,
    PerReplica,
    VariableSynchronization,
    get_variable,
    get_variable_scope,
    optimizers,
    variable_scope,
)
from strategy.partitioners import FixedShardsPartitioner
from strategy.placement import Device, parse
from strategy.server.parameter_server import LocalHost

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}


class Named(NamedTuple):
    x: Any
    y: Any


@pytest.fixture
def make():
    with ExitStack() as stack:

        def build(count=1, servers=3, worker=1, **options):
            cluster = Cluster(stack, servers=servers, workers=2)
            return cluster.worker(worker, num_replicas_per_worker=count, **options)

        yield build


@pytest.fixture
def alone():
    host = LocalHost()
    yield ParameterServerStrategy(server=host)
    host.endpoint.close()


def variables(strategy, *names, **options):
    with strategy.scope():
        return [get_variable(name, (8,), np.float64, 0.0, **options) for name in names]


class TestExtended:
    def test_what_it_says_of_itself(self, make, alone):
        chief, other = make(2, worker=0), make(2)
        devices = tuple(f"/job:worker/task:1/device:CPU:{n}" for n in range(2))
        assert other.extended.worker_devices == devices
        assert other.extended.parameter_devices == tuple(f"/job:ps/task:{n}" for n in range(3))
        for name in ("experimental_should_init", "should_checkpoint", "should_save_summary"):
            assert getattr(chief.extended, name) is True
            assert getattr(other.extended, name) is False
        assert other.extended.experimental_between_graph is True
        assert other.extended.experimental_require_static_shapes is False
        assert alone.extended.worker_devices == ("/device:CPU:0",)
        assert alone.extended.parameter_devices == ("/device:CPU:0",)

    def test_variables_beside_another(self, make):
        strategy = make(variable_partitioner=FixedShardsPartitioner(2))
        (first,) = variables(strategy, "first", partitioner=FixedShardsPartitioner(1))
        with strategy.extended.colocate_vars_with(first):
            beside = variables(strategy, "a", "b", "c")
        (apart,) = variables(strategy, "apart")
        where = {id(v.remotes[0].connection) for v in (first, *beside)}
        assert len(where) == 1
        assert [len(v.remotes) for v in (*beside, apart)] == [1, 1, 1, 2]

    def test_whose_variable_it_is(self, make, alone):
        strategy = make()
        (own,), (foreign,) = variables(strategy, "v"), variables(alone, "v")
        extended = strategy.extended
        assert extended.variable_created_in_scope(own)
        for other in (foreign, np.zeros(3), None):
            assert not extended.variable_created_in_scope(other)
            with (
                pytest.raises(ValueError, match="is no variable of this strategy"),
                extended.colocate_vars_with(other),
            ):
                pass
            with pytest.raises(ValueError, match="is no variable of this strategy"):
                extended.update(other, print)

    @pytest.mark.parametrize(
        "destination",
        [
            "/job:worker/task:1/device:CPU:0",
            "/device:CPU:0",
            "/job:ps/task:2",
            np.zeros(2),
            "",
            [""],
        ],
    )
    def test_reduce_to(self, make, destination):
        extended = make(2).extended
        values = PerReplica([np.ones(2), np.full(2, 4.0)])
        np.testing.assert_array_equal(extended.reduce_to("sum", values, destination), [5, 5])
        sums = extended.batch_reduce_to("mean", [(values, destination), (3, destination)])
        assert [np.asarray(one).tolist() for one in sums] == [[2.5, 2.5], 3]
        with pytest.raises(ValueError, match="3 is not of several replicas"):
            extended.reduce_to("sum", 3, destination)
        assert extended.broadcast_to(values, destination) is values
        assert extended.broadcast_to(4.5, destination) == 4.5

    @pytest.mark.parametrize(
        ("destination", "message"),
        [
            ("/job:worker/task:0", "is not on this worker"),
            ("/job:chief/task:1", "is not on this worker"),
            (["/device:CPU:0", "/device:CPU:0"], "one destination is needed"),
            ("/somewhere", "is no name of a device"),
        ],
    )
    def test_destinations_elsewhere(self, make, destination, message):
        with pytest.raises(ValueError, match=message):
            make().extended.reduce_to("sum", 1, destination)

    def test_update(self, make):
        strategy = make(2)
        (v,) = variables(strategy, "v")
        extended = strategy.extended

        def add(variable, amount, factor=1):
            return variable.assign_add(amount * factor)

        one = PerReplica([2])
        assert extended.update(v, add, (one,), {"factor": 3}) is None
        assert extended.update(v, add, (one,), group=False) == v.version
        np.testing.assert_array_equal(v, np.full(8, 8))
        with pytest.raises(ValueError, match="reduce them first"):
            extended.update(v, add, (PerReplica([1, 2]),))
        strategy.run(  # assignments in an update count at once, whatever the aggregation
            lambda: strategy_merge(lambda given: given.extended.update(v, add, (1,)))
        )
        np.testing.assert_array_equal(extended.read_var(v), np.full(8, 9))
        assert extended.value_container(v) is v

    def test_what_optimizers_keep_once(self, make):
        strategy = make()
        made = variables(strategy, "c", "a", "b")
        extended = strategy.extended
        where = extended.non_slot_devices(made)
        assert where is made[1]

        def create(name):
            return variables(strategy, name)[0]

        power = extended.update_non_slot(where, create, ("power",), group=False)
        assert power.remotes[0].connection is where.remotes[0].connection
        assert extended.update_non_slot("/job:ps/task:0", create, ("other",)) is None
        with pytest.raises(ValueError, match="is not on this worker"):
            extended.update_non_slot("/job:worker/task:0", create, ("third",))

    def test_a_loop_of_steps(self, make):
        strategy = make()
        seen = []

        def step(context, element):
            seen.append(element)
            context.set_last_step_output("sum", PerReplica([element, 1]), "sum")
            context.set_last_step_output("plain", element)
            context.set_non_tensor_output("all", list(seen))

        elements = iter(range(10, 20))
        run = strategy.extended.experimental_run_steps_on_iterator
        context = run(step, elements, iterations=3, initial_loop_values={"first": 0})
        assert context.last_step_outputs == {"first": 0, "sum": 13, "plain": 12}
        assert context.non_tensor_outputs == {"all": [10, 11, 12]}
        assert next(elements) == 13


def strategy_merge(function):
    from strategy import get_replica_context

    return get_replica_context().merge_call(function)


class TestDevices:
    @pytest.mark.parametrize(
        ("name", "device"),
        [
            ("", Device()),
            ("/job:ps/task:3", Device("ps", None, "3")),
            ("/job:worker/replica:0/task:1/device:GPU:2", Device("worker", "0", "1", "GPU:2")),
            ("cpu", Device(device="CPU:0")),
            ("/gpu:1", Device(device="GPU:1")),
        ],
    )
    def test_names(self, name, device):
        assert parse(name) == device
        assert parse(str(device)) == device

    @pytest.mark.parametrize("name", ["/task:x", "TPU:0", "/job:a/job:b", "/device:CPU:0:1"])
    def test_what_is_no_name(self, name):
        with pytest.raises(ValueError, match="is no name of a device"):
            parse(name)

    def test_scopes_of_devices(self, make):
        strategy = make(2)
        with strategy.device("/job:worker") as outer:
            assert outer == "/job:worker/task:1/device:CPU:0"
            with strategy.device("CPU:1") as inner:
                assert inner == "/job:worker/task:1/device:CPU:1"
                (v,) = variables(strategy, "v")
        assert v.assign(1) == 2  # on its ps, whatever the scope
        for name in ("/job:ps/task:0", "CPU:2", "GPU:0", "/task:0"):
            with (
                pytest.raises(ValueError, match="is no device of this worker"),
                strategy.device(name),
            ):
                pass

    def test_colocation_of_operations_warns(self, make):
        strategy = make()
        (v,) = variables(strategy, "v")
        with (
            pytest.warns(UserWarning, match="extended.colocate_vars_with"),
            strategy.colocate_with(v),
        ):
            pass
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with strategy.extended.colocate_vars_with(v):
                pass

    def test_some_parameter_devices(self, make):
        strategy = make(parameter_devices=["/job:ps/task:2", "/job:ps/task:0"])
        variables(strategy, *"abcd")
        assert strategy.extended.parameter_devices == ("/job:ps/task:0", "/job:ps/task:2")
        assert len({id(r.connection) for r in strategy.creator.remotes.values()}) == 2

    @pytest.mark.parametrize("devices", [[], ["/job:ps/task:3"], ["/job:worker/task:0"]])
    def test_parameter_devices_that_are_not_there(self, make, devices):
        with pytest.raises(ValueError, match=r"parameter_devices .* are not among"):
            make(parameter_devices=devices)


class TestInput:
    def test_an_iterator_has_batches_for_each_replica(self, make):
        data = [np.arange(2) + n for n in range(5)]
        iterator = make(2).make_dataset_iterator(data)
        for _ in range(2):
            rounds = [[part.tolist() for part in element.values] for element in iterator]
            assert rounds == [[[0, 1], [1, 2]], [[2, 3], [3, 4]]]
            iterator.initialize()
        assert next(make(1).make_dataset_iterator(data)).tolist() == [0, 1]

    def test_input_functions(self, make):
        strategy, seen = make(2), []

        def dataset(context):
            seen.append(context)
            return range(4)

        def function(context):
            numbers = iter(range(3))
            return lambda: next(numbers)

        assert [e.values for e in strategy.make_input_fn_iterator(dataset)] == [(0, 1), (2, 3)]
        (context,) = seen
        assert (context.num_input_pipelines, context.input_pipeline_id) == (2, 1)
        assert context.num_replicas_in_sync == 2
        assert context.get_per_replica_batch_size(6) == 3
        with pytest.raises(ValueError, match="a batch of 7 cannot be divided equally among 2"):
            context.get_per_replica_batch_size(7)
        assert [e.values for e in strategy.make_input_fn_iterator(function)] == [(0, 1)]
        with pytest.raises(ValueError, match="the replication mode is 'per_worker'"):
            strategy.make_input_fn_iterator(dataset, "per_replica")

    def test_batches_are_divided_among_replicas(self, make):
        strategy = make(2)
        batches = [{"x": np.arange(5), "y": (np.ones((4, 1)), np.ones(2))}]
        given = strategy.experimental_distribute_dataset(batches)
        (element,) = given
        assert len(given) == 1
        first, second = element["x"].values
        assert (first.tolist(), second.tolist()) == ([0, 1, 2], [3, 4])
        assert [part.shape for part in element["y"][0].values] == [(2, 1), (2, 1)]
        for x, y in strategy.experimental_distribute_dataset([(np.ones(2), np.zeros(2))]):
            differences = strategy.run(lambda x, y: (x - y).tolist(), args=(x, y))
            assert strategy.reduce("sum", differences) == [2.0]
        (named,) = strategy.experimental_distribute_dataset([Named(np.arange(4), [np.ones(4)])])
        assert type(named) is Named
        assert [part.tolist() for part in named.x.values] == [[0, 1], [2, 3]]
        assert [part.tolist() for part in named.y[0].values] == [[1, 1], [1, 1]]
        assert list(make(1).experimental_distribute_dataset([3, 4])) == [3, 4]
        with pytest.raises(ValueError, match="3 has none: batch the dataset first"):
            next(iter(strategy.experimental_distribute_dataset([3])))
        both = strategy.experimental_distribute_datasets_from_function(
            lambda context: [np.arange(4) + 10 * context.input_pipeline_id]
        )
        assert [[part.tolist() for part in element.values] for element in both] == [
            [[10, 11], [12, 13]]
        ]

    def test_datasets_of_arrays(self, make):
        strategy = make()
        dataset = strategy.experimental_make_numpy_dataset(
            (np.arange(7), {"y": np.arange(14.0)[::2]})
        )
        assert len(dataset) == 7
        assert [(int(x), float(rest["y"])) for x, rest in dataset][2] == (2, 4.0)
        assert [x.tolist() for x, _ in dataset.batch(3)] == [[0, 1, 2], [3, 4, 5], [6]]
        assert len(dataset.batch(3, drop_remainder=True)) == 2
        own = strategy.experimental_distribute_dataset(dataset)
        assert [int(x) for x, _ in own] == [1, 3, 5]
        with pytest.raises(ValueError, match="equally long"):
            strategy.experimental_make_numpy_dataset((np.arange(2), np.arange(3)))
        with pytest.raises(ValueError, match="at least one row"):
            dataset.batch(0)


def test_a_scope_is_opened_again_and_reuses_from_then_on():
    with ParameterServerStrategy().scope():
        with variable_scope("outer"), variable_scope("inner") as scope:
            made = get_variable("v", 3)
            get_variable_scope().reuse_variables()
            assert get_variable("v", 3) is made
            with pytest.raises(ValueError, match="does not exist"):
                get_variable("w", 3)
        with variable_scope("elsewhere"), variable_scope(scope):
            assert get_variable_scope().name == "outer/inner"
            assert get_variable("v", 3) is made
        get_variable_scope().reuse_variables()  # of a scope without a name, which is gone
        get_variable("v", 3)


class TestVariableScopes:
    def test_names(self, make):
        strategy = make()
        with variable_scope("a"), variable_scope("b/c") as scope:
            assert get_variable_scope() is scope
            (v,) = variables(strategy, "v")
        assert v.name == "a/b/c/v"
        assert get_variable_scope().name == ""

    def test_reuse(self, make):
        strategy = make()
        with variable_scope("a", reuse=AUTO_REUSE):
            (v,), (again,) = variables(strategy, "v"), variables(strategy, "v")
            with variable_scope("b"):
                inner = [variables(strategy, "v")[0] for _ in range(2)]
        with variable_scope("a", reuse=True):
            (found,) = variables(strategy, "v")
            with pytest.raises(ValueError, match="variable 'a/w' does not exist"):
                variables(strategy, "w")
            (without,) = [get_in(strategy, "v", None, None)]
            assert without is v
            with pytest.raises(ValueError, match=r"variable 'a/v' is float64\[8\], .*float32\[8\]"):
                get_in(strategy, "v", (8,), np.float32)
            with pytest.raises(ValueError, match=r"as float64\[9\]"):
                get_in(strategy, "v", (9,), np.float64)
        assert v is again is found
        assert inner[0] is inner[1]
        with variable_scope("a"), pytest.raises(ValueError, match="variable 'a/v' exists already"):
            variables(strategy, "v")

    @pytest.mark.parametrize("name", ["", "a:b"])
    def test_wrong_names(self, name):
        with pytest.raises(ValueError, match="a variable scope needs a name"), variable_scope(name):
            pass

    def test_what_a_variable_is_for(self, make):
        strategy = make()
        (plain,) = variables(strategy, "plain")
        (count,) = variables(strategy, "count", synchronization="on_read", aggregation="sum")
        assert plain.trainable
        assert not count.trainable
        assert count.synchronization is VariableSynchronization.ON_READ
        with pytest.raises(ValueError, match="ON_READ cannot be trainable"):
            variables(strategy, "v", synchronization="on_read", trainable=True)
        for options in ({"aggregation": "median"}, {"synchronization": "sometimes"}):
            with pytest.raises(
                ValueError, match=r"unknown Variable.* the known ones are (NONE|AUTO)"
            ):
                variables(strategy, "v", **options)


def get_in(strategy, name, shape, dtype):
    with strategy.scope():
        return get_variable(name, shape, dtype)


class TestConfigure:
    def test_a_cluster_that_comes_later(self):
        with mpidist.Server(CLUSTER, "worker", 0) as server:
            host = LocalHost()
            strategy = ParameterServerStrategy(server=host)
            assert strategy.extended.parameter_devices == ("/device:CPU:0",)
            config = mpidist_pb2.ConfigProto(device_filters=["/job:old"], log_device_placement=True)
            strategy.configure(config, CLUSTER, "worker", 0)
            assert strategy.extended.parameter_devices == ("/job:ps/task:0",)
            assert list(config.device_filters) == ["/job:worker/task:0", "/job:ps"]
            assert config.log_device_placement
            (v,) = variables(strategy, "v")
            optimizers.SGD(1.0).apply_gradients([(np.ones(8), v)]).wait()
            assert int(strategy.global_step) == 1
            with pytest.raises(RuntimeError, match="has variables already"):
                strategy.configure(cluster_spec=CLUSTER)
            host.endpoint.close()
            assert server.job_name == "worker"

    def test_without_a_server(self, alone):
        with pytest.raises(FailedPreconditionError, match="no Server has been started"):
            alone.configure(cluster_spec=ClusterSpec(CLUSTER))
        config = mpidist_pb2.ConfigProto(device_filters=["/job:ps"])
        assert list(alone.update_config_proto(config).device_filters) == []
        assert list(config.device_filters) == ["/job:ps"]

    def test_an_evaluator_needs_only_itself(self):
        with mpidist.Server({**CLUSTER, "evaluator": ["localhost:0"]}, "evaluator", 0):
            strategy = ParameterServerStrategy()
            updated = strategy.update_config_proto(mpidist_pb2.ConfigProto())
            assert list(updated.device_filters) == ["/job:evaluator/task:0"]
