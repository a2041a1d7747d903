"""Placement of variables on ps tasks."""

import contextlib

import numpy as np
import pytest
from _cases.servers import Cluster, variable
from hypothesis import given
from hypothesis import strategies as st

from mpidist import ClusterSpec
from mpidist.errors import InvalidArgumentError
from strategy import (
    GreedyLoadBalancingStrategy,
    ParameterServerStrategy,
    RandomStrategy,
    byte_size_load_fn,
    optimizers,
    replica_device_setter,
)
from strategy.placement import PLACEMENTS, Placement
from strategy.protocol.layout import Layout

sizes = st.lists(st.integers(0, 1 << 30), max_size=60)


@pytest.fixture
def cluster():
    with contextlib.ExitStack() as stack:
        yield Cluster(stack, servers=3)


def places(placement, layouts):
    """Return the ps tasks of variables that are created one after the other."""
    chosen = []
    for number, layout in enumerate(layouts):
        chosen += placement.choose([(f"v{number}", layout)])
        placement.note(chosen[-1], layout)
    return chosen


def layouts_of(lengths):
    return [Layout((nbytes,), np.uint8) for nbytes in lengths]


@given(sizes, st.integers(1, 8))
def test_no_server_is_ahead_by_more_than_one_variable(variables, servers):
    loads = [0] * servers
    chosen = places(Placement("bytes", servers), layouts_of(variables))
    for nbytes, server in zip(variables, chosen, strict=True):
        assert loads[server] == min(loads)
        loads[server] += nbytes + 64
    assert max(loads) - min(loads) <= max(variables, default=0) + 64


@given(sizes, st.integers(1, 8), st.sampled_from(PLACEMENTS))
def test_parts_are_placed_like_variables(variables, servers, name):
    parts = [(f"v{number}", layout) for number, layout in enumerate(layouts_of(variables))]
    placement = Placement(name, servers)
    first = placement.choose(parts)
    assert (
        first == placement.choose(parts) == places(Placement(name, servers), layouts_of(variables))
    )
    assert all(0 <= server < servers for server in first)


def test_empty_variables_go_round():
    assert places(Placement("bytes", 3), layouts_of([0] * 6)) == [0, 1, 2, 0, 1, 2]


def test_round_robin_takes_no_account_of_sizes():
    assert places(Placement("round_robin", 3), layouts_of([9, 1, 1, 0, 5])) == [0, 1, 2, 0, 1]


def test_a_variable_that_was_not_created_has_no_place():
    for name in PLACEMENTS:
        placement, layout = Placement(name, 3), Layout((5,), np.uint8)
        assert placement.choose([("v", layout)]) == placement.choose([("v", layout)])


def test_hashes_spread_and_do_not_depend_on_the_order():
    placement, (one, other) = Placement("hash", 4), layouts_of([1, 7])
    names = [f"layer{n}/weights" for n in range(400)]
    chosen = {name: placement.choose([(name, one)])[0] for name in names}
    assert chosen == {name: placement.choose([(name, other)])[0] for name in reversed(names)}
    assert np.bincount(list(chosen.values()), minlength=4).min() > 60


def test_what_is_no_placement():
    with pytest.raises(ValueError, match="unknown placement 'best'"):
        Placement("best", 2)
    with pytest.raises(TypeError, match="or a function, not 3"):
        Placement(3, 2)
    for answer, error in ((2, ValueError), (-1, ValueError), (None, TypeError), (True, TypeError)):
        placement = Placement(lambda *_, answer=answer: answer, 2)
        with pytest.raises(error, match="placement of variable 'v' gives"):
            placement.choose([("v", Layout((), np.uint8))])


def test_in_local_mode_the_last_ps_stands_for_others():
    for answer in (0, 1, 2, 7):
        placement = Placement(lambda *_, answer=answer: answer, 2, alone=True)
        assert placement.choose([("v", Layout((), np.uint8))]) == [min(answer, 1)]
    with pytest.raises(ValueError, match="gives ps -1"):
        Placement(lambda *_: -1, 1, alone=True).choose([("v", Layout((), np.uint8))])


class TestTensorFlowsNames:
    SPEC = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["w0:2222", "w1:2222"]}  # noqa: RUF012

    def test_by_load(self):
        lengths = [5, 1, 1, 1, 2, 2]
        for load_fn, expected in (
            (byte_size_load_fn, [0, 1, 1, 1, 1, 0]),
            (lambda name, shape, dtype: 1, [0, 1, 0, 1, 0, 1]),
        ):
            chosen = GreedyLoadBalancingStrategy(2, load_fn)
            assert places(Placement(chosen, 2), layouts_of(lengths)) == expected

    def test_bytes(self):
        assert byte_size_load_fn("v", (3, 5), np.dtype("float32")) == 60
        assert byte_size_load_fn("v", (), np.dtype("int64")) == 8

    def test_by_name(self):
        """The choices are the expected values of TensorFlow's own tests."""
        names = ["Variable", "Variable_1", "Variable_2", "Variable_3"]
        chooser = RandomStrategy(2, seed=0)
        assert [chooser(name, (), np.dtype(int)) for name in names] == [1, 0, 1, 1]
        assert chooser("A unicode \u018e string \xf1", (), np.dtype(int)) == 1
        others = [RandomStrategy(2, seed)("Variable", (), np.dtype(int)) for seed in range(20)]
        assert set(others) == {0, 1}

    def test_a_device_setter(self):
        layouts = layouts_of([9, 1, 1, 0, 5])
        for arguments in (
            {"cluster": self.SPEC},
            {"cluster": ClusterSpec(self.SPEC), "ps_tasks": 7},
            {"cluster": ClusterSpec(self.SPEC).as_cluster_def()},
            {"ps_tasks": 2, "ps_device": "/job:ps/cpu:0", "worker_device": "/job:worker/task:1"},
            {"ps_tasks": 2, "ps_ops": ["Variable", "Other"], "merge_devices": False},
        ):
            placement = Placement(replica_device_setter(**arguments), 2)
            assert places(placement, layouts) == [0, 1, 0, 1, 0]
        greedy = GreedyLoadBalancingStrategy(2, byte_size_load_fn)
        assert replica_device_setter(cluster=self.SPEC, ps_strategy=greedy) is greedy

    @pytest.mark.parametrize("arguments", [{}, {"cluster": {"worker": ["a:1"]}}, {"cluster": {}}])
    def test_a_device_setter_without_ps_tasks(self, arguments):
        assert replica_device_setter(**arguments) is None
        assert places(Placement(None, 2), layouts_of([9, 1, 1])) == [0, 1, 1]

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: GreedyLoadBalancingStrategy(0, len), ValueError, "num_tasks is 0"),
            (lambda: GreedyLoadBalancingStrategy(2, 7), TypeError, "load_fn is 7, not a function"),
            (lambda: RandomStrategy(-1), ValueError, "num_ps_tasks is -1"),
            (lambda: RandomStrategy(2, "x"), TypeError, "seed must be a whole number"),
            (lambda: replica_device_setter(-1), ValueError, "ps_tasks is -1"),
            (lambda: replica_device_setter(2.5), TypeError, "ps_tasks must be a whole number"),
            (lambda: replica_device_setter(2, "/job:w"), ValueError, "on tasks of job 'ps'"),
            (lambda: replica_device_setter(2, ""), ValueError, "on tasks of job 'ps'"),
            (
                lambda: replica_device_setter(2, worker_device="there"),
                ValueError,
                "is no name of a device",
            ),
            (
                lambda: replica_device_setter(2, ps_ops=["MatMul"]),
                ValueError,
                "only variables are placed",
            ),
            (
                lambda: replica_device_setter(2, ps_strategy="round_robin"),
                TypeError,
                "'round_robin', not a function",
            ),
            (lambda: replica_device_setter(cluster=3), TypeError, "ClusterSpec is made"),
        ],
    )
    def test_what_makes_no_sense(self, make, error, message):
        with pytest.raises(error, match=message):
            make()

    def test_strategies_take_them(self, cluster):
        setter = replica_device_setter(cluster=cluster.spec)
        strategy = cluster.worker(0, placement=setter)
        made = [variable(strategy, f"v{n}", 3) for n in range(3)]  # created after the global step
        found = [strategy._connections.index(v.remotes[0].connection) for v in made]
        assert found == [1, 2, 0]
        with ParameterServerStrategy(placement=RandomStrategy(5)) as alone:
            assert variable(alone, "v", 3).assign_add(1) == 2


def test_variables_lie_where_they_are_placed(cluster):
    def by_axis(name, shape, dtype):
        return len(shape)

    strategy = cluster.worker(0, placement=by_axis)
    made = [variable(strategy, f"v{n}", (2,) * n) for n in (2, 0, 1)]
    found = [strategy._connections.index(v.remotes[0].connection) for v in made]
    assert found == [2, 0, 1]
    for v in made:
        v.assign_add(np.ones(v.shape))
        np.testing.assert_array_equal(v, np.ones(v.shape))


def test_the_first_worker_decides_about_places(cluster):
    found = []
    for index, placement in enumerate(("round_robin", lambda *_: 0)):
        strategy = cluster.worker(index, placement=placement)
        made = [variable(strategy, f"v{n}", 5) for n in range(3)]
        found.append([v.remotes[0].connection.index for v in made])
    assert found[0] == found[1] == [1, 2, 0]


def test_a_place_that_another_worker_does_not_use(cluster):
    variable(cluster.worker(0, placement=lambda *_: 2), "v", 5)
    devices = ["/job:ps/task:0", "/job:ps/task:1"]
    with pytest.raises(InvalidArgumentError, match=r"worker 0 created .* on ps 2, which is not"):
        cluster.worker(1, parameter_devices=devices)  # creates the global step


def spread(*loads):
    """Return a placement with one variable of the given size in bytes on each server."""
    placement = Placement(lambda name, shape, dtype: int(name), len(loads))
    for server, layout in enumerate(layouts_of(loads)):
        placement.note(server, layout)
    return placement


def test_an_imbalance_in_words():
    mib = 1 << 20
    assert spread(4 * mib, 4 * mib, 3 * mib).imbalance() == ""
    assert spread(100, 0).imbalance() == ""  # too small to matter
    assert spread(8 * mib).imbalance() == ""
    problem = spread(8 * mib, mib, 0).imbalance()
    assert "8.0, 1.0, 0.0 MiB on the ps tasks" in problem
    assert "2.7 times the mean" in problem


def test_an_imbalance_is_said_once(cluster, caplog):
    strategies = [cluster.worker(index) for index in range(2)]
    made = [variable(strategy, "v", 1 << 20) for strategy in strategies]
    for _ in range(2):
        for v in made:
            optimizers.SGD(0.1).apply_gradients([(np.ones(v.shape), v)]).wait()
    said = [record for record in caplog.records if "spread unevenly" in record.message]
    assert len(said) == 1
