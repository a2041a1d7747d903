"""Errors for unusable gradients, variables and options."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from _cases.servers import Cluster

import mpidist
from mpidist.cluster_resolver import SimpleClusterResolver, mpi
from mpidist.config import config as settings
from mpidist.errors import FailedPreconditionError
from strategy import (
    ParameterServerStrategy,
    PerReplica,
    get_variable,
    optimizers,
    partitioners,
)
from strategy.protocol import cluster as protocol_cluster

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}


@pytest.fixture
def strategy():
    with ParameterServerStrategy() as strategy, strategy.scope():
        yield strategy


def apply(*pairs):
    return optimizers.SGD(1.0).apply_gradients(pairs)


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.array(1.0)])
def test_a_number_is_no_gradient_of_an_array(strategy, number):
    v, scalar = get_variable("v", (4, 3), initializer="zeros"), get_variable("s", (), initializer=0)
    with pytest.raises(ValueError, match=r"gradient of variable 'v' is a number, .* \(4, 3\)"):
        apply((np.ones(()), scalar), (number, v))
    apply((number, scalar)).wait()
    assert float(scalar) == -1
    assert not v.numpy().any()


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            lambda v: [(np.ones(2), v), (v, np.ones(2))],
            "number 1 .* is strategy.variable.Variable and numpy.ndarray",
        ),
        (lambda v: [np.ones(2)], "number 0 of what it got is numpy.ndarray"),
        (lambda v: (np.ones(2), v), "number 0 of what it got is numpy.ndarray"),
        (lambda v: {"v": np.ones(2)}, "number 0 of what it got is str"),
        (lambda v: [(np.ones(2), v, 3)], "number 0 .* is numpy.ndarray and .*Variable and int"),
    ],
)
def test_what_are_no_pairs(strategy, pairs, message):
    v = get_variable("v", 2)
    with pytest.raises(TypeError, match=message):
        optimizers.SGD(1.0).apply_gradients(pairs(v))


def test_which_gradient_it_is(strategy):
    v, w = get_variable("v", 2), get_variable("w", 2)
    with pytest.raises(TypeError) as info:
        apply((np.ones(2), v), ([1.0, 2.0], w))
    assert info.value.__notes__ == ["It is the gradient of variable 'w'."]
    with pytest.raises(ValueError, match=r"variables come twice: \['w'\]"):
        apply((np.ones(2), w), (np.ones(2), v), (np.ones(2), w))


def test_parts_go_by_the_name_of_the_variable(strategy):
    v = get_variable("v", 4, partitioner=partitioners.FixedShardsPartitioner(2))
    with pytest.raises(mpidist.errors.InvalidArgumentError, match=r"elements: \['v'\]"):
        apply((np.full(4, np.nan), v))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"shape": (2.5, 3)}, ValueError, r"'v' cannot have the shape \(2.5, 3\)"),
        ({"shape": (None, 3)}, ValueError, r"'v' cannot have the shape \(None, 3\)"),
        ({"shape": np.full(99, 0.5)}, ValueError, r"\.\.\.\).*first value is .*initializer"),
        ({"shape": 2, "dtype": "flaot32"}, TypeError, "variable 'v': 'flaot32' is no dtype"),
        ({"name": 3, "shape": 2}, TypeError, "name is a str, not int: 3"),
        ({"name": None, "shape": 2}, TypeError, "name is a str, not NoneType"),
    ],
)
def test_what_makes_no_variable(strategy, arguments, kind, message):
    with pytest.raises(kind, match=message):
        get_variable(**{"name": "v"} | arguments)


def test_items_are_not_assigned(strategy):
    v = get_variable("v", 4, initializer=1)
    with pytest.raises(TypeError, match=r"'v' lives on a ps.*use assign.*scatter_update"):
        v[0] = 3
    np.testing.assert_array_equal(v, np.ones(4))


def test_an_initializer_without_arguments(strategy):
    with pytest.raises(TypeError) as info:
        get_variable("v", 2, initializer=lambda: 1)
    assert info.value.__notes__ == [
        "The initializer of variable 'v' is called with (shape, dtype)."
    ]


def test_values_of_replicas_are_no_handle():
    with pytest.raises(AttributeError, match=r"has no 'wait'.*strategy.group"):
        PerReplica([1, 2]).wait()
    assert not hasattr(PerReplica([1]), "shape")


def test_a_server_that_was_forgotten_under_the_launcher(monkeypatch):
    def launched_with(layout):
        changed = replace(settings, jobs=layout)
        monkeypatch.setattr(protocol_cluster, "settings", changed)
        monkeypatch.setattr(mpi, "config", changed)

    launched_with("ps=1,worker=2")
    with pytest.raises(FailedPreconditionError, match="mpidist run describes a cluster, and no "):
        ParameterServerStrategy()
    with ParameterServerStrategy(cluster_spec={}) as alone:
        assert alone.is_chief
    launched_with("worker=3")
    ParameterServerStrategy().close()


def test_one_process_runs_the_script_of_a_cluster_with_backup_workers():
    with mpidist.Server(CLUSTER, "worker", 0):
        strategy = ParameterServerStrategy(mode="sync", backup_workers=1)
        with strategy.scope():
            v = get_variable("v", 2, initializer="zeros")
        assert apply((np.ones(2), v)).result().contributed


def test_what_a_checkpoint_has_beside_the_program_is_said(tmp_path, caplog):
    for names in ("ab", "a"):
        with ParameterServerStrategy() as strategy:
            with strategy.scope():
                for name in names:
                    get_variable(name, 2)
            path = strategy.latest_checkpoint(str(tmp_path))
            if path is not None:
                strategy.restore(path)
            strategy.save(str(tmp_path))
    (record,) = caplog.records
    assert "['b']" in record.getMessage()


def test_what_several_servers_refuse_is_raised_once():
    with ExitStack() as stack:
        strategy = Cluster(stack, servers=2).worker(0)
        with strategy.scope():
            v = get_variable(
                "v", 4000, bool, True, partitioner=partitioners.FixedShardsPartitioner(2)
            )
        assert v.remotes[0].connection is not v.remotes[1].connection
        with pytest.raises(mpidist.errors.InvalidArgumentError, match="part_0") as info:
            v.assign_sub(np.ones(4000, bool))
        assert ["part_1" in note for note in info.value.__notes__] == [True]
        np.testing.assert_array_equal(v, np.ones(4000, bool))
        v.assign(np.zeros(4000, bool))


@pytest.mark.parametrize("dtype", [">f8", ">f4", np.longdouble, np.int64])
def test_the_norm_of_gradients_of_any_dtype(strategy, dtype):
    v = get_variable("v", 2, np.float64, "zeros")
    large = 3e30 if np.dtype(dtype).itemsize == 4 else 3e6 if dtype == np.int64 else 3e100
    gradient = np.array([large, large * 4 / 3]).astype(dtype)
    optimizers.SGD(1.0, global_clipnorm=1.0).apply_gradients([(gradient, v)]).wait()
    np.testing.assert_allclose(v, [-0.6, -0.8], rtol=1e-6 if dtype == ">f4" else 1e-12)


def test_the_cluster_resolver_of_a_strategy():
    spec = {"ps": ["localhost:0"], "worker": ["localhost:0"]}
    resolver = SimpleClusterResolver(mpidist.ClusterSpec(spec), task_type="worker", task_id=0)
    with mpidist.Server(spec, "worker", 0):
        with ParameterServerStrategy(resolver) as strategy:
            assert strategy.cluster_resolver is resolver
        made = ParameterServerStrategy().cluster_resolver
    assert made.cluster_spec() == mpidist.ClusterSpec(spec)
    assert (made.task_type, made.task_id) == ("worker", 0)
