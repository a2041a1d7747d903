"""Replicas inside a worker: they meet, share variables, and push once."""

import threading
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import pytest
from _cases.servers import Cluster

from mpidist import ReduceOp
from strategy import (
    IndexedSlices,
    PerReplica,
    VariableAggregation,
    get_replica_context,
    get_variable,
    in_cross_replica_context,
    optimizers,
)
from strategy.replicas.reduce import reduced

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
# Sums of these in their own dtype are 256, 0.25 times 3, and infinite.
HALVES = [(BF16, [256] + [1] * 7), (BF16, [100, -99, 0]), (FP16, [40000, 40000])]


@pytest.fixture
def make():
    with ExitStack() as stack:

        def build(count=2, servers=2, **options):
            cluster = Cluster(stack, servers=servers, workers=2)
            return cluster.worker(0, num_replicas_per_worker=count, **options)

        yield build


def number():
    return get_replica_context().replica_id_in_sync_group


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_replica_runs_the_function(make, count):
    strategy = make(count)

    def step(own, shared, named):
        context = get_replica_context()
        assert not in_cross_replica_context()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == count == strategy.num_replicas_in_sync
        assert context.devices == (f"/job:worker/task:0/device:CPU:{number()}",)
        return own, shared, named, number()

    values = PerReplica([f"own {n}" for n in range(count)])
    results = strategy.run(step, args=(values, "shared"), kwargs={"named": values})
    own = tuple(f"own {n}" for n in range(count))
    expected = (own, ("shared",) * count, own, tuple(range(count)))
    assert tuple(map(strategy.experimental_local_results, results)) == expected
    assert {isinstance(result, PerReplica) for result in results} == {count > 1}
    assert in_cross_replica_context()
    assert get_replica_context() is None


def test_names_of_run(make):
    strategy = make(2)
    for run in (strategy.run, strategy.experimental_run_v2, strategy.call_for_each_replica):
        assert strategy.unwrap(run(number)) == (0, 1)
    assert strategy.unwrap(strategy.extended.call_for_each_replica(number)) == (0, 1)
    iterator = strategy.make_dataset_iterator(range(10, 20))
    assert strategy.unwrap(strategy.experimental_run(lambda x: x, iterator)) == (10, 11)


@pytest.mark.parametrize("count", [1, 3])
def test_merge_calls(make, count):
    strategy = make(count)
    calls = []

    def merge(given, value, factor):
        assert given is strategy
        assert in_cross_replica_context()
        calls.append(value)
        return strategy.reduce("sum", value) * strategy.unwrap(factor)[0], value

    def step():
        context = get_replica_context()
        out = []
        for round_number in range(3):
            value = np.array([number() + round_number])
            out.append(context.merge_call(merge, (value,), {"factor": 10}))
        return out

    for round_number, (total, own) in enumerate(strategy.run(step)):
        for n in range(count):
            assert strategy.unwrap(own)[n].tolist() == [n + round_number]
            expected = 10 * (sum(range(count)) + count * round_number)
            assert strategy.unwrap(total)[n].tolist() == [expected]
    assert len(calls) == 3


def test_collectives_of_replicas(make):
    def step():
        context = get_replica_context()
        value = np.full((2, 1), number(), np.float32)
        return (
            context.all_reduce("sum", value),
            context.all_reduce("mean", number()),
            context.all_gather(value, axis=1),
        )

    strategy = make(3)
    for total, mean, gathered in zip(*map(strategy.unwrap, strategy.run(step)), strict=True):
        np.testing.assert_array_equal(total, [[3], [3]])
        assert mean == 1.0
        np.testing.assert_array_equal(gathered, [[0, 1, 2]] * 2)


def test_collectives_of_structures(make):
    strategy = make(2)

    def step():
        context = get_replica_context()
        pair = [np.ones(2), np.full((2, 2), number())]
        return context.all_reduce("sum", pair), context.all_gather((np.ones(1), pair[1]), 0)

    (ones, numbers), (gathered, stacked) = strategy.run(step)
    for n in range(2):
        np.testing.assert_array_equal(ones.values[n], [2, 2])
        np.testing.assert_array_equal(numbers.values[n], [[1, 1]] * 2)
        np.testing.assert_array_equal(gathered.values[n], [1, 1])
        np.testing.assert_array_equal(stacked.values[n], [[0, 0]] * 2 + [[1, 1]] * 2)


def test_what_is_done_once_for_all_is_refused_on_a_replica(make):
    strategy = make(2)
    with strategy.scope():
        v = get_variable("v", 3, initializer=0.0)
    for call in (
        lambda: strategy.reduce("sum", 1.0),
        lambda: strategy.gather(np.ones(1), 0),
        lambda: strategy.extended.reduce_to("sum", 1.0, v),
        lambda: strategy.extended.update(v, lambda x: x.assign_add(1)),
        lambda: strategy.extended.update_non_slot(v, print),
    ):
        with pytest.raises(RuntimeError, match="is called in replica"):
            strategy.run(call)
    np.testing.assert_array_equal(v, np.zeros(3))


def test_a_variable_goes_through_a_merge_call_as_itself(make):
    strategy = make(2)
    with strategy.scope():
        v = get_variable("v", 3, np.float64, 0.0)

    def merge(given, variable, delta):
        assert variable is v
        mean = given.extended.reduce_to("mean", delta, variable)
        return given.extended.update(variable, lambda var, x: var.assign_add(x), (mean,))

    strategy.run(lambda: get_replica_context().merge_call(merge, (v, np.full(3, number() + 1.0))))
    np.testing.assert_array_equal(v, [1.5] * 3)


def test_too_few_values_for_the_replicas(make):
    with pytest.raises(ValueError, match="replica 2 has no value"):
        make(3).run(lambda x: x, (PerReplica([1, 2]),))


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_rows_that_cannot_be_added_up(make, aggregation):
    strategy = make(2)
    with strategy.scope():
        v = get_variable("v", (2, 1), np.float64, 1.0, aggregation=aggregation)
        first = get_variable("first", (2, 1), np.float64, 1.0, aggregation="only_first_replica")
    for name in ("update", "mul", "div", "max", "min"):
        with pytest.raises(ValueError, match="needs aggregation ONLY_FIRST_REPLICA"):
            strategy.run(lambda name=name: getattr(v, f"scatter_{name}")([0], [[2.0]]))
    np.testing.assert_array_equal(v, [[1], [1]])
    strategy.run(lambda: first.scatter_update([0], [[2.0 + number()]]))
    np.testing.assert_array_equal(first, [[2], [1]])


def test_variables_of_another_strategy(make):
    one, other = make(1), make(1)
    with other.scope():
        v = get_variable("v", 3, initializer=0.0)
    with pytest.raises(ValueError, match="was it made outside of"):
        one.run(lambda: optimizers.SGD(1.0).apply_gradients([(np.ones(3), v)]))


def test_an_error_of_one_replica_ends_all(make):
    def step():
        if number() == 1:
            raise KeyError("one")
        get_replica_context().merge_call(lambda strategy: None)

    with pytest.raises(KeyError, match="one"):
        make(3).run(step)


def test_an_error_in_a_merge_call_reaches_all(make):
    caught = []

    def merge(strategy):
        raise ValueError("not so")

    def step():
        try:
            get_replica_context().merge_call(merge)
        except ValueError as error:
            caught.append(error)

    make(3).run(step)
    assert [str(error) for error in caught] == ["not so"] * 3


def test_a_replica_that_ends_early(make):
    def step():
        if number() == 0:
            get_replica_context().merge_call(lambda strategy: None)

    with pytest.raises(
        RuntimeError, match="replica 0 waits in merge_call, and another one has ended"
    ):
        make(2).run(step)


def test_replicas_that_merge_otherwise(make):
    def one(strategy):
        """Never called."""

    def other(strategy):
        """Never called."""

    with pytest.raises(RuntimeError, match=r"replica 0 merges by .*one and replica 1 by .*other"):
        make(2).run(lambda: get_replica_context().merge_call((one, other)[number()]))


@pytest.mark.parametrize("count", [1, 2])
def test_a_replica_cannot_run_others(make, count):
    strategy = make(count)
    with pytest.raises(RuntimeError, match="is called in replica"):
        strategy.run(lambda: strategy.run(number))


def test_variables_are_shared_by_name(make):
    strategy = make(3)
    made = []

    def step():
        made.extend(get_variable(name, (4,), initializer=np.arange(4.0)) for name in "ab")

    assert strategy.run(step) is None
    assert len(made) == 6
    assert len({id(v) for v in made}) == 2
    with pytest.raises(ValueError, match="variable 'a' exists already"):
        strategy.run(step)


def test_a_replica_makes_a_name_once(make):
    def step():
        get_variable("a", 2)
        get_variable("a", 2)

    with pytest.raises(ValueError, match="variable 'a' exists already"):
        make(2).run(step)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_of_replicas_make_one_push(make, count):
    strategy = make(count)
    with strategy.scope():
        v = get_variable("v", (3,), np.float64, 0.0)
        table = get_variable("table", (5, 2), np.float64, 0.0)
    optimizer = optimizers.SGD(1.0)

    def step():
        rows = IndexedSlices(np.full((1, 2), 4.0), [number() % 5])
        pairs = [(np.full(3, 2.0 ** number()), v), (rows, table), (None, strategy.global_step)]
        return optimizer.apply_gradients(pairs)

    works = strategy.unwrap(strategy.run(step))
    assert len({id(work) for work in works}) == 1
    strategy.group(works[0])
    np.testing.assert_allclose(v, np.full(3, -(2**count - 1) / count))
    expected = np.zeros((5, 2))
    for n in range(count):
        expected[n % 5] -= 4.0 / count
    np.testing.assert_allclose(table, expected)
    assert int(strategy.global_step) == 1


def test_gradients_of_different_variables(make):
    strategy = make(2)
    with strategy.scope():
        made = [get_variable(name, (), np.float64, 0.0) for name in "ab"]

    def step():
        optimizers.SGD(1.0).apply_gradients([(np.ones(()), made[number()])])

    optimizer = optimizers.SGD(1.0)
    with pytest.raises(ValueError, match="gradients of different variables"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(()), made[number()])]))
    with pytest.raises(ValueError, match="gradients of different variables"):
        strategy.run(step)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sum", 6.0), (VariableAggregation.MEAN, 3.0), ("ONLY_FIRST_REPLICA", 2.0)],
)
def test_assignments_of_all_replicas(make, aggregation, expected):
    strategy = make(2)
    with strategy.scope():
        v = get_variable("v", (2,), np.float64, 0.0, aggregation=aggregation)
    assert v.aggregation is VariableAggregation[getattr(aggregation, "name", aggregation).upper()]
    versions = strategy.run(lambda: v.assign(np.full(2, 2.0 * (number() + 1))))
    assert strategy.unwrap(versions) == (2, 2)
    np.testing.assert_array_equal(v, np.full(2, expected))
    strategy.run(lambda: v.assign_add(2.0 * (number() + 1)))
    np.testing.assert_array_equal(v, np.full(2, 2 * expected))
    strategy.run(lambda: v.scatter_sub([0], 2.0 * (number() + 1)))
    np.testing.assert_array_equal(v, [expected, 2 * expected])
    v.assign(7)
    np.testing.assert_array_equal(v, [7, 7])


def test_assignments_without_aggregation(make):
    strategy = make(2)
    with strategy.scope():
        v = get_variable("v", (2,), np.float64, 0.0)
    with pytest.raises(ValueError, match="has aggregation NONE"):
        strategy.run(lambda: v.assign(1))
    strategy.run(lambda: get_replica_context().merge_call(lambda strategy: v.assign(5)))
    np.testing.assert_array_equal(v, [5, 5])


def test_replicas_that_assign_to_different_variables(make):
    strategy = make(2)
    with strategy.scope():
        made = [get_variable(n, (), np.float64, 0.0, aggregation="sum") for n in "ab"]
    with pytest.raises(RuntimeError, match="different variables at a time"):
        strategy.run(lambda: made[number()].assign(1))


def test_reductions(make):
    strategy = make(2)
    values = PerReplica([np.array([[1.0, 2], [3, 4]]), np.array([[5.0, 6]])])
    np.testing.assert_array_equal(strategy.reduce("sum", values, axis=0), [9, 12])
    np.testing.assert_array_equal(strategy.reduce("MEAN", values, axis=0), [3, 4])
    assert strategy.reduce("mean", PerReplica([1, 2])) == 1.5
    assert strategy.reduce(ReduceOp.MEAN, 3) == 3
    assert strategy.reduce(ReduceOp.SUM, 0) == 0
    with pytest.raises(ValueError, match="3 is not of several replicas"):
        strategy.reduce(ReduceOp.SUM, 3)
    with pytest.raises(TypeError, match="cannot be taken apart like a tuple"):
        tuple(values)
    results = strategy.run(lambda: ([1.0, 2.0], {"a": np.full(2, number())}))
    summed = strategy.reduce("sum", results)
    assert (summed[0], summed[1]["a"].tolist()) == ([2.0, 4.0], [1, 1])
    np.testing.assert_array_equal(strategy.gather(values, 0), [[1, 2], [3, 4], [5, 6]])
    with pytest.raises(ValueError, match="different shapes"):
        strategy.reduce("sum", values)
    with pytest.raises(ValueError, match="SUM or MEAN, not 'max'"):
        strategy.reduce("max", values)
    with pytest.raises(ValueError, match="unknown reduction"):
        strategy.reduce("median", values)
    assert strategy.experimental_distribute_values_from_function(
        lambda context: 10 * context.replica_id_in_sync_group + context.num_replicas_in_sync
    ).values == (2, 12)


@pytest.mark.parametrize("count", [0, -1])
def test_too_few_replicas(make, count):
    with pytest.raises(ValueError, match="at least one replica"):
        make(count)


def test_replicas_work_at_the_same_time(make):
    meeting = threading.Barrier(3)
    assert sorted(make(3).run(lambda: meeting.wait(30)).values) == [0, 1, 2]


def test_steps_of_replicas_and_workers(make):
    """Two workers of two replicas each, in step: the mean of all four."""
    with ExitStack() as stack:
        cluster = Cluster(stack, workers=2)
        results = [None, None]

        def train(index):
            strategy = cluster.worker(index, num_replicas_per_worker=2, mode="sync")
            with strategy.scope():
                v = get_variable("v", (2,), np.float64, 0.0)

            def step():
                grad = np.full(2, 4.0 ** (2 * index + number()))
                optimizers.SGD(1.0).apply_gradients([(grad, v)]).wait()

            strategy.run(step)
            results[index] = v.read_value()

        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for result in results:
            np.testing.assert_array_equal(result, np.full(2, -(1 + 4 + 16 + 64) / 4))


@pytest.mark.parametrize(("dtype", "values"), HALVES)
@pytest.mark.parametrize("of_variable", ["own", np.float32])
def test_gradients_of_halves_are_added_in_float32(make, dtype, values, of_variable):
    strategy = make(len(values))
    own = dtype if of_variable == "own" else of_variable
    with strategy.scope():
        v = get_variable("v", (3,), own, "zeros")
        table = get_variable("table", (5, 2), own, "zeros")

    def step():
        grad = np.full(3, values[number()], dtype)
        rows = IndexedSlices(np.full((1, 2), values[number()], dtype), [4])
        return optimizers.SGD(1.0).apply_gradients([(grad, v), (rows, table)])

    strategy.run(step).values[0].wait()
    mean = np.float32(sum(values)) / np.float32(len(values))
    expected = -mean.astype(own).astype(np.float32)  # rounded once
    np.testing.assert_allclose(v.read_value().astype(float), [expected] * 3, rtol=1e-6)
    # Of rows each is divided before all are added.
    changed = table.read_value().astype(float)
    np.testing.assert_allclose(changed[4], [expected] * 2, rtol=1e-5)
    assert not changed[:4].any()


@pytest.mark.parametrize(("dtype", "values"), HALVES)
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_assigned_halves_are_added_in_float32(make, dtype, values, name):
    strategy = make(len(values))
    with strategy.scope():
        v = get_variable("v", (3,), np.float32, "zeros", aggregation=name)
        table = get_variable("table", (5, 2), np.float32, "zeros", aggregation=name)

    def step():
        v.assign_add(np.full(3, values[number()], dtype))
        table.scatter_add([4], np.full((1, 2), values[number()], dtype))

    strategy.run(step)
    expected = sum(values) / (len(values) if name == "mean" else 1)
    np.testing.assert_allclose(v, [expected] * 3, rtol=1e-6)
    np.testing.assert_allclose(table.gather(4), [expected] * 2, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "values"), HALVES)
def test_halves_that_are_reduced_are_rounded_once(make, dtype, values):
    def step():
        context, own = get_replica_context(), np.full(3, values[number()], dtype)
        return context.all_reduce("mean", [own]), own

    (means,), own = make(len(values)).run(step)
    mean = np.float32(sum(values)) / np.float32(len(values))
    for one in means.values:
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, np.full(3, mean.astype(dtype)))
    for axis in (None, 0):
        wide, rounded = (reduced("mean", own, axis, rounded=given) for given in (False, True))
        assert (wide.dtype, rounded.dtype) == (np.float32, dtype)
        np.testing.assert_array_equal(wide, np.full(wide.shape, mean))
        np.testing.assert_array_equal(rounded, wide.astype(dtype))
    slices = PerReplica([IndexedSlices(one, [0, 1, 2]) for one in own.values])
    wide, rounded = (reduced("mean", slices, rounded=given).values for given in (False, True))
    assert (wide.dtype, rounded.dtype) == (np.float32, dtype)


def test_many_halves_along_an_axis():
    ones = PerReplica([np.ones(1000, BF16)] * 2)
    assert reduced("sum", ones, axis=0) == 2000
    assert reduced("sum", ones, axis=0, rounded=True).dtype == BF16
    mixed = PerReplica([np.full(2, 256, BF16), np.ones(2, FP16)])
    assert reduced("sum", mixed, rounded=True).tolist() == [257, 257]


def test_variables_as_values_of_replicas(make):
    strategy = make(2)
    with strategy.scope():
        v = get_variable("v", (2,), initializer=[1.0, 2.0], aggregation="sum")
        w = get_variable("w", (2,), initializer=0.0)
        table = get_variable("table", (3, 2), initializer=0.0, aggregation="mean")

    def step():
        context = get_replica_context()
        table.scatter_add([number()], np.asarray(v)[None])
        slices = IndexedSlices(table, np.arange(3))
        optimizers.SGD(1.0).apply_gradients([(v, w), (slices, table)])
        v.assign_add(v)
        return context.all_reduce("sum", {"v": v}), context.all_gather(v, 0)

    totals, gathered = strategy.run(step)
    np.testing.assert_array_equal(w, [-1, -2])
    np.testing.assert_array_equal(table, np.zeros((3, 2)))
    np.testing.assert_array_equal(v, [3, 6])
    for total, both in zip(totals["v"].values, gathered.values, strict=True):
        np.testing.assert_array_equal(total, [6, 12])
        np.testing.assert_array_equal(both, [3, 6, 3, 6])


@pytest.mark.parametrize("problem", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_a_merge_call_reaches_all(make, problem):
    caught = []

    def step():
        context = get_replica_context()
        assert context.merge_call(lambda strategy: "before") == "before"
        try:
            context.merge_call(leave)
        except BaseException as error:
            caught.append(type(error))

    def leave(strategy):
        raise problem

    make(3).run(step)
    assert caught == [problem] * 3
