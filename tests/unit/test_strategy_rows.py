"""Rows of variables: gathered, scattered, and changed by optimizers."""

import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.errors import InvalidArgumentError
from strategy import (
    Bags,
    IndexedSlices,
    ParameterServerStrategy,
    get_variable,
    optimizers,
)
from strategy.client import pull as client_pull
from strategy.proto import parameter_server_pb2 as pb
from strategy.protocol import rows as shared_rows
from strategy.protocol.rows import merged

CLUSTER = {"ps": ["localhost:0"], "worker": ["localhost:0"]}
KINDS = ("SGD", "Adagrad", "RMSprop", "Adam", "AdamW", "Ftrl")
COMBINERS = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


@pytest.fixture(autouse=True, params=["auto", "rma", "p2p"])
def strategy(request):
    """Yield a strategy with an open scope."""
    with mpidist.Server(CLUSTER, "worker", 0):
        strategy = ParameterServerStrategy(transport=request.param)
        with strategy.scope():
            yield strategy


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def same_fixture(function):
    """Let examples share the strategy: each example makes its own variable."""
    return settings(
        deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )(function)


@pytest.mark.parametrize("shape", [(10,), (10, 3), (10, 2, 2), (10, 100_000)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16, np.bool_])
def test_rows_come_in_the_order_asked_for(shape, dtype):
    value = (100 * random(0, *shape)).astype(dtype)
    v = get_variable("v", shape, dtype, value)
    for indices in ([3], [9, 0, 9, 2], [[1, 2], [2, 1]], np.array([4, 4], np.uint8), [], 5):
        rows = v.gather(indices)
        np.testing.assert_array_equal(rows, value[np.asarray(indices, np.int64)])
        assert rows.dtype == dtype
    out = np.empty((2, *shape[1:]), dtype)
    assert v.sparse_read([7, 1], out) is out
    np.testing.assert_array_equal(out, value[[7, 1]])


@pytest.mark.parametrize(
    ("indices", "error"),
    [([10], IndexError), ([-1], IndexError), ([0, 3, 10], IndexError), ([1.0], TypeError),
     (["a"], TypeError), ([True], TypeError)],
)  # fmt: skip
def test_rows_that_cannot_be(indices, error):
    v = get_variable("v", (10, 2), initializer="zeros")
    for use in (
        v.gather,
        lambda ids: v.scatter_add(ids, np.ones((len(ids), 2))),
        lambda ids: optimizers.SGD().apply_gradients(
            [(IndexedSlices(np.ones((len(ids), 2), np.float32), ids), v)]
        ),
    ):
        with pytest.raises(error, match="variable 'v'"):
            use(indices)
    np.testing.assert_array_equal(v, np.zeros((10, 2)))


def test_arguments_that_do_not_fit(strategy):
    v = get_variable("v", (4, 2), initializer="zeros")
    for bad in (
        np.empty((2, 3), np.float32),
        np.empty((2, 2)),
        np.empty((2, 4), np.float32)[:, ::2],
    ):
        with pytest.raises(ValueError, match="out must be a writable C-contiguous"):
            v.gather([0, 1], bad)
    for values in (np.ones(2), np.ones((1, 2)), np.ones((2, 3))):
        with pytest.raises(ValueError, match=r"has shape .* and 2 rows of the variable \(2, 2\)"):
            v.scatter_update([0, 1], values)
    with pytest.raises(TypeError, match="cannot become float32"):
        v.scatter_update([0], np.ones((1, 2), complex))
    with pytest.raises(ValueError, match="give no others"):
        v.scatter_add(IndexedSlices(np.ones((1, 2)), [0]), 1)
    for assign in (v.assign, v.assign_add):
        with pytest.raises(TypeError, match="by its scatter_ methods"):
            assign(IndexedSlices(np.ones((1, 2)), [0]))
    counts, flags = get_variable("n", 3, int, 1), get_variable("b", 3, bool, False)
    for refused in (lambda: counts.scatter_div([0], 2), lambda: flags.scatter_div([0], True)):
        with pytest.raises(TypeError, match="cannot be divided in place"):
            refused()
    with pytest.raises(InvalidArgumentError, match="cannot subtract"):
        flags.scatter_sub([0], True)
    with pytest.raises(ValueError, match="has no rows"):
        strategy.global_step.gather([0])


@pytest.mark.parametrize("name", ["update", "add", "sub", "mul", "div", "min", "max"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32])
def test_scattering(name, dtype):
    """The result equals the changes applied one after the other."""
    if name == "div" and dtype == np.int32:
        return
    start = (5 * random(1, 8, 3)).astype(dtype)
    v = get_variable("v", (8, 3), dtype, start)
    ids = np.array([6, 1, 6, 0, 6])
    values = (4 * random(2, 5, 3) + 9).astype(dtype)
    expected = start.astype(float)
    step = {"update": lambda a, b: b, "sub": np.subtract, "div": np.divide} | COMBINERS
    for row, value in zip(ids, values, strict=True):
        expected[row] = step[name](expected[row], value.astype(float))
    assert getattr(v, f"scatter_{name}")(ids, values) == v.version == 2
    np.testing.assert_allclose(v, expected, rtol=3e-6)
    version = getattr(v, f"scatter_{name}")(IndexedSlices(np.ones((1, 3), dtype), [4]))
    assert version == 3


def test_numbers_and_lists_for_rows():
    v = get_variable("v", (4, 2), np.uint8, "zeros")
    v.scatter_update([1, 2], 7)
    v.scatter_add([2], [[1, 2]])
    np.testing.assert_array_equal(v, [[0, 0], [7, 7], [8, 9], [0, 0]])
    v.scatter_add([], np.empty((0, 2), np.uint8))
    assert v.version == 4


@same_fixture
@given(
    ids=st.lists(st.integers(0, 20), max_size=40),
    name=st.sampled_from([*COMBINERS, None]),
    dtype=st.sampled_from([np.int64, np.float64, ml_dtypes.bfloat16]),
)
def test_merging(ids, name, dtype):
    rows = (10 * random(3, len(ids), 2)).astype(dtype)
    kept, values = merged(np.array(ids, np.int64), rows, COMBINERS.get(name))
    assert list(kept) == sorted(set(ids))
    assert values.dtype == dtype
    for row, value in zip(kept, values, strict=True):
        here = rows[np.array(ids) == row].astype(float)
        expected = COMBINERS[name].reduce(here, axis=0) if name else here[-1]
        np.testing.assert_allclose(value.astype(float), expected, rtol=1e-2, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("highest", [9, 1 << 40])
def test_merging_many(monkeypatch, dtype, compiled, highest):
    if not compiled:
        monkeypatch.setattr(shared_rows, "can_compile", lambda: False)
    ids = np.random.default_rng(0).integers(0, highest, 9000)
    ids[:50] = ids[50:100]
    rows = random(3, len(ids), 2, 8).astype(dtype)[::-1]
    kept, values = merged(ids, rows, np.add)
    unique, places = np.unique(ids, return_inverse=True)
    np.testing.assert_array_equal(kept, unique)
    sums, sizes = np.zeros((2, len(unique), 2, 8))
    np.add.at(sums, places, rows)
    np.add.at(sizes, places, abs(rows))
    assert values.dtype == dtype
    eps = {2: 1e-3, 4: 1e-6, 8: 1e-14}[np.dtype(dtype).itemsize]
    assert (abs(values - sums) <= eps * sizes).all()


@given(st.integers(0, 63), st.one_of(st.integers(0, 50), st.integers(4096, 6000)), st.booleans())
@settings(deadline=None)
def test_numbers_each_once(bits, count, negative):
    ids = np.random.default_rng(count).integers(-5 if negative else 0, 1 << bits, count)
    np.testing.assert_array_equal(shared_rows._ascending(ids), np.argsort(ids, kind="stable"))
    for ours, numpy in zip(
        shared_rows.distinct(ids), np.unique(ids, return_inverse=True), strict=True
    ):
        np.testing.assert_array_equal(ours, numpy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_optimizers_change_many_rows(kind, dtype):
    """The rows take more than one piece."""
    optimizer = getattr(optimizers, kind)(0.1)
    start, named = random(4, 5000, 80).astype(dtype), np.random.default_rng(5).permutation(5000)
    named = named[:2500]
    v = get_variable("v", start.shape, dtype, start)
    few = get_variable("few", (len(named), 80), dtype, start[named])
    for seed in range(2):
        grad = random(10 + seed, len(named), 80).astype(dtype)
        optimizer.apply_gradients([(IndexedSlices(grad, named), v), (grad, few)])
    expected = start.copy()
    expected[named] = few
    np.testing.assert_array_equal(v, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_optimizers_change_the_rows_that_are_named(kind, dtype):
    """The result equals an update of a variable with only these rows."""
    optimizer = getattr(optimizers, kind)(0.1)
    start, named = random(4, 40, 7).astype(dtype), np.array([30, 2, 3, 17])
    v = get_variable("v", (40, 7), dtype, start)
    few = get_variable("few", (4, 7), dtype, start[named])
    for seed in range(3):
        grad = random(10 + seed, 4, 7).astype(dtype)
        optimizer.apply_gradients([(IndexedSlices(grad, named), v), (grad, few)])
    expected = start.copy()
    expected[named] = few
    np.testing.assert_array_equal(v, expected)


def test_gradients_of_one_row_add_up():
    v = get_variable("v", (5, 2), np.float64, "zeros")
    slices = IndexedSlices(np.array([[1.0, 2], [3, 4], [5, 6]]), [4, 0, 4])
    optimizers.SGD(1.0).apply_gradients([(slices, v)])
    np.testing.assert_array_equal(v, [[-3, -4], [0, 0], [0, 0], [0, 0], [-6, -8]])


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.float16])
def test_gradients_of_one_row_add_up_in_the_dtype_of_the_variable(dtype):
    v = get_variable("v", (2, 1), np.float64, "zeros")
    values = np.full((3000, 1), 100).astype(dtype)
    slices = IndexedSlices(values, np.zeros(3000, int))
    optimizers.SGD(1.0).apply_gradients([(slices, v)])
    np.testing.assert_array_equal(v, [[-values.astype(float).sum()], [0]])
    v.scatter_add(slices)
    np.testing.assert_array_equal(v, np.zeros((2, 1)))


def test_norms_of_rows_and_whole_variables_together():
    v, w = get_variable("v", (5, 1), np.float64, "zeros"), get_variable("w", 1, np.float64, "zeros")
    sgd = optimizers.SGD(1.0, global_clipnorm=1.0)
    sgd.apply_gradients(
        [(IndexedSlices(np.array([[1.0], [2.0]]), [2, 2]), v), (np.array([4.0]), w)]
    )
    np.testing.assert_allclose(v, [[0], [0], [-0.6], [0], [0]])
    np.testing.assert_allclose(w, [-0.8])


@pytest.mark.parametrize("shape", [(3, 400_000), (400_000, 3)])
def test_large_rows_and_many_rows(shape):
    start = random(5, *shape)
    v = get_variable("v", shape, np.float64, start)
    ids = np.arange(shape[0])[::-1][: shape[0] // 2 + 1]
    grad = random(6, len(ids), shape[1])
    optimizers.Adam(0.1).apply_gradients([(IndexedSlices(grad, ids), v)])
    start[ids] -= 0.1 * grad / (abs(grad) + 1e-7)
    np.testing.assert_allclose(v.gather(ids), start[ids], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(v, start, rtol=1e-6, atol=1e-9)


def test_a_server_checks_rows_itself(strategy):
    v = get_variable("v", (5, 2), np.float64, "zeros")
    connection = v.remotes[0].connection
    for ids in ([5], [-1]):
        numbers = np.array(ids)
        with pytest.raises(InvalidArgumentError, match="has not all rows"):
            client_pull.request(v.remotes[0], np.empty((1, 2)), numbers).result()
        (change,) = v.changes(IndexedSlices(np.ones((1, 2)), [0]), lambda _: pb.ADD)
        change.ids = numbers
        with pytest.raises(InvalidArgumentError, match="has not all rows"):
            connection.push([change]).wait()
    v.scatter_add([0], 1.0)
    np.testing.assert_array_equal(v.gather([0]), [[1, 1]])


def test_rows_are_of_one_version():
    v = get_variable("v", (300_000, 2), np.float64, "zeros")
    stop, ids = threading.Event(), np.array([0, 150_000, 299_999])

    def change():
        while not stop.is_set():
            v.scatter_add(ids, 1.0)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            rows = v.gather(ids)
            assert rows.min() == rows.max()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_bags(combiner, dtype):
    table = random(7, 20, 3).astype(dtype)
    v = get_variable("v", (20, 3), dtype, table)
    ids, weights = [[3, 5, 5], [], [7], [0, 19]], [[1.0, 2.0, 0.5], [], [3.0], [1.0, 1.0]]
    divisor = {
        "sum": lambda w: 1.0, "mean": np.sum, "sqrtn": lambda w: np.sqrt(np.sum(np.square(w)))
    }[combiner]  # fmt: skip
    for chosen in (weights, None):
        bags = Bags(ids, chosen, combiner)
        expected = np.zeros((4, 3))
        for row, (numbers, factors) in enumerate(zip(ids, chosen or ids, strict=True)):
            w = np.array(factors if chosen else np.ones(len(numbers)), float)
            if numbers:
                expected[row] = w @ table[numbers].astype(float) / divisor(w)
        flat = np.concatenate([*map(np.array, ids)]).astype(int)
        same = Bags(flat, chosen and np.concatenate(chosen), combiner, offsets=[0, 3, 3, 4])
        for one in (bags, same):
            assert len(one) == 4
            np.testing.assert_allclose(one.lookup(v), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_bags_of_integers(dtype):
    v = get_variable("v", (4, 1), dtype, np.arange(4).reshape(4, 1).astype(dtype))
    for bags in (
        Bags([[1, 3], [2]]),
        Bags([[1, 3], [2]], combiner="sqrtn"),
        Bags([[1, 3], [2]], [[0.5, 1], [1]], "sum"),
    ):
        with pytest.raises(TypeError, match=r"variable 'v' of .* cannot be combined by"):
            bags.lookup(v)
    if dtype != np.bool_:
        assert Bags([[1, 3], [], [2]], combiner="sum").lookup(v).tolist() == [[4], [0], [2]]
        assert Bags([[1, 3]], [[2, 1]], "sum").lookup(v).tolist() == [[5]]


def test_gradients_of_bags_in_other_dtypes():
    slices = Bags([[1, 2, 1], [0]]).gradient(np.full((2, 1), 3))
    np.testing.assert_allclose(slices.values, [[1], [1], [1], [3]])
    slices = Bags([[1, 2, 1], [0]]).gradient(np.ones((2, 1), ml_dtypes.bfloat16))
    np.testing.assert_allclose(slices.values, [[1 / 3]] * 3 + [[1]], rtol=1e-6)
    assert Bags([[1], [0]], combiner="sum").gradient(np.ones((2, 1), int)).values.dtype == int


def test_variables_as_rows():
    v = get_variable("v", (4, 2), initializer=0.0)
    rows = get_variable("rows", initializer=np.float32([[1, 2], [3, 4]]))
    ids = get_variable("ids", initializer=np.array([3, 1]))
    v.scatter_add(ids, rows)
    np.testing.assert_array_equal(v.gather(ids), rows)
    v.scatter_sub(IndexedSlices(rows, ids))
    np.testing.assert_array_equal(v, np.zeros((4, 2)))
    optimizers.SGD(1.0).apply_gradients([(IndexedSlices(rows, ids), v)])
    np.testing.assert_array_equal(-v.gather(ids), rows)


def test_rows_of_halves_are_rounded_once():
    v = get_variable("v", (2, 1), ml_dtypes.bfloat16, "zeros")
    v.scatter_add([1, 1, 1], np.float32([[100 / 3], [-33], [0]]))
    assert v[1, 0] == np.float32(1 / 3).astype(v.dtype)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_gradients_of_bags(combiner):
    """The gradients equal finite differences of the loss."""
    table, upstream = random(8, 6, 2), random(9, 3, 2)
    v = get_variable("v", (6, 2), np.float64, table)
    bags = Bags([[1, 4, 1], [0], []], [[0.5, 2.0, 1.0], [3.0], []], combiner)
    slices = bags.gradient(upstream)
    gradient = np.zeros((6, 2))
    np.add.at(gradient, slices.indices, slices.values)
    for row, column in np.ndindex(6, 2):
        step = np.zeros((6, 2))
        step[row, column] = 1e-6
        v.assign(table + step)
        above = np.sum(bags.lookup(v) * upstream)
        v.assign(table - step)
        slope = (above - np.sum(bags.lookup(v) * upstream)) / 2e-6
        np.testing.assert_allclose(gradient[row, column], slope, atol=1e-7)


def test_bags_that_cannot_be():
    for arguments, options, match in (
        (([[1]], None, "max"), {}, "unknown combiner 'max'"),
        (([[1, 2]], [[1.0]]), {}, "weights must be lists as long"),
        (([1, 2],), {"offsets": [1]}, "offsets must ascend from 0"),
        (([1, 2],), {"offsets": []}, "offsets must ascend from 0"),
        (([1, 2],), {"offsets": [0, 3]}, "offsets must ascend from 0"),
        (([1, 2], [1.0]), {"offsets": [0]}, "need as many weights"),
    ):
        with pytest.raises(ValueError, match=match):
            Bags(*arguments, **options)
    with pytest.raises(TypeError, match="must be integers"):
        Bags([[1.5]])
    with pytest.raises(ValueError, match="2 bags need as many gradients"):
        Bags([[1], [2]]).gradient(np.ones((3, 2)))
