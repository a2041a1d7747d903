"""Changes of variables: assignments and gradients."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.errors import InvalidArgumentError
from strategy import IndexedSlices, ParameterServerStrategy, get_variable, optimizers
from strategy.partitioners import FixedShardsPartitioner


@pytest.fixture(autouse=True, params=["auto", "rma", "p2p"])
def strategy(request):
    """Yield a strategy with an open scope."""
    cluster = {"ps": ["localhost:0"], "worker": ["localhost:0"]}
    with mpidist.Server(cluster, "worker", 0):
        strategy = ParameterServerStrategy(transport=request.param)
        with strategy.scope():
            yield strategy


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# Sizes in a bucket, alone in one block, and in several blocks.
SIZES = [1, 100, 4096, 300_000]


@pytest.mark.parametrize("size", SIZES)
def test_assignments_return_the_new_version_once_they_are_applied(size):
    v = get_variable("v", size, np.float64, "zeros")
    assert v.version == 1
    values = [random(seed, size) for seed in range(3)]
    assert v.assign(values[0]) == 2
    np.testing.assert_array_equal(v, values[0])
    assert v.assign_add(values[1]) == 3
    assert v.assign_sub(values[2]) == v.version == 4
    np.testing.assert_array_equal(v, values[0] + values[1] - values[2])


@pytest.mark.parametrize("value", [2, 2.5, np.float32(3), np.array([1, 2]), [1, 2.5], (3, 4)])
def test_what_can_be_assigned(value):
    v = get_variable("v", 2, np.float32, "zeros")
    v.assign(value)
    np.testing.assert_array_equal(v, np.broadcast_to(np.asarray(value, np.float32), 2))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
@pytest.mark.parametrize("value", [1.5, [1.5, 2.5], np.array([1.5, 2.5]), np.float32(2), 1j])
def test_fractions_do_not_become_integers(dtype, value):
    v = get_variable("v", 2, dtype, 7)
    with pytest.raises(TypeError):
        v.assign(value)
    v.assign([1, 2])
    v.assign_add(3)
    np.testing.assert_array_equal(v, [4, 5])


@pytest.mark.parametrize(
    "value", [1 << 33, np.int64(1 << 33), [0, 1 << 33], np.array([0, 1 << 33]), np.uint32(1 << 31)]
)
def test_integers_that_do_not_fit(value):
    v = get_variable("v", 2, np.int32, 7)
    for change in (v.assign, v.assign_add, v.assign_sub):
        with pytest.raises(ValueError, match=r"\d+ does not fit int32, the dtype of variable 'v'"):
            change(value)
    with pytest.raises(ValueError, match="does not fit int32"):
        v.scatter_add([1], value if np.ndim(value) == 0 else value[1:])
    np.testing.assert_array_equal(v, [7, 7])


def test_integers_that_fit():
    small, large = get_variable("s", 2, np.uint8), get_variable("l", 2, np.int64)
    for value in (np.int64(255), np.array([255, 0], np.uint16), [255, 0]):
        small.assign(value)
        assert small[0] == 255
    large.assign(np.int32(-5))
    np.testing.assert_array_equal(large, [-5, -5])


@pytest.mark.parametrize("value", [1j, np.complex64(1j), np.ones(2, complex), [1j, 0]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_complex_numbers_do_not_become_others(dtype, value):
    v = get_variable("v", 2, dtype, 7.0)
    with pytest.raises(TypeError, match="cannot become"):
        v.assign(value)
    np.testing.assert_array_equal(v.read_value().astype(float), [7, 7])


@pytest.mark.parametrize("parts", [None, FixedShardsPartitioner(2)])
@pytest.mark.parametrize("size", [4, 300_000])
def test_variables_as_values(parts, size):
    start = random(0, size)
    v = get_variable("v", size, np.float64, "zeros", partitioner=parts)
    w = get_variable("w", size, np.float64, start, partitioner=parts)
    v.assign(w)
    np.testing.assert_array_equal(v, start)
    v.assign_add(w)
    v.assign_sub(v)
    np.testing.assert_array_equal(v, np.zeros(size))
    optimizers.SGD(1.0).apply_gradients([(w, v)])
    np.testing.assert_array_equal(v, -start)
    np.testing.assert_array_equal(w, start)
    counts = get_variable("n", size, int)
    with pytest.raises(TypeError, match="has dtype float64, which cannot become int64"):
        counts.assign(w)
    with pytest.raises(ValueError, match="has shape"):
        v.assign(get_variable("x", size + 1))


@pytest.mark.parametrize("value", [np.zeros(3), np.zeros((2, 1)), [1], np.array(1.0)])
def test_a_wrong_shape(value):
    v = get_variable("v", 2)
    for change in (v.assign, v.assign_add, v.assign_sub):
        with pytest.raises(ValueError, match=r"'v' has shape .*, and the variable \(2,\)"):
            change(value)
    with pytest.raises(ValueError, match="shape"):
        optimizers.SGD(1).apply_gradients([(np.asarray(value), v)])
    assert v.assign(0) == 2


@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), data=st.data())
def test_arrays_of_any_strides_and_dtype(strategy, rows, columns, data):
    full = random(rows, 2 * rows, 2 * columns).astype(data.draw(st.sampled_from("fd")))
    change = data.draw(st.sampled_from([full[::2, ::2], full[::-2, 1::2], full[:rows, :columns]]))
    if data.draw(st.booleans()):
        change = np.asfortranarray(change)
    name = f"v{len(strategy.creator.by_name)}"
    v = get_variable(name, (rows, columns), initializer="zeros")
    optimizers.SGD(1.0).apply_gradients([(change, v)])
    np.testing.assert_array_equal(v, -change.astype(np.float32))


@pytest.mark.parametrize("size", SIZES)
def test_sgd(strategy, size):
    v = get_variable("v", size, np.float64, random(0, size))
    optimizer = optimizers.SGD(0.25)
    works = [optimizer.apply_gradients([(random(seed, size), v)]) for seed in (1, 2, 3)]
    applied = [work.result() for work in works]
    assert [a.versions for a in applied] == [(2,), (3,), (4,)]
    assert [a.staleness for a in applied] == [(0,), (0,), (0,)]
    expected = random(0, size) - 0.25 * (random(1, size) + random(2, size) + random(3, size))
    np.testing.assert_allclose(v, expected, rtol=1e-12, atol=1e-12)
    assert int(strategy.global_step) == 3


@pytest.mark.parametrize("parts", [None, FixedShardsPartitioner(2)])
@pytest.mark.parametrize(
    ("dtype", "given", "numbers"),
    [
        ("float32", "float32", {}), ("float64", "float64", {}), ("float32", "float16", {}),
        ("float64", "float32", {}), ("float16", "float16", {}),
        ("float32", "float32", {"weight_decay": 0.5}), ("float32", "float32", {"momentum": 0.5}),
        ("float32", "float32", {"global_clipnorm": 1e-3}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [100, 300_000])
def test_sgd_rounds_as_numpy_does(size, dtype, given, numbers, parts):
    """The worker or the server may multiply by the learning rate: the result is the same."""
    start = random(0, size).astype(dtype)
    v = get_variable("v", size, dtype, start, partitioner=parts)
    optimizer = optimizers.SGD(0.3, **numbers)
    param, velocity = start.astype(np.promote_types(dtype, np.float32)), 0
    for step in range(1, 4):
        grad = random(step, size).astype(given)
        optimizer.apply_gradients([(grad, v)]).wait()
        wide = grad.astype(param.dtype)
        if "global_clipnorm" in numbers:
            wide = wide * param.dtype.type(1e-3 / math.sqrt(np.vdot(wide, wide)))
        if "weight_decay" in numbers:
            wide = param * param.dtype.type(0.5) + wide
        velocity = velocity * param.dtype.type(numbers.get("momentum", 0)) + wide
        param = param - velocity * param.dtype.type(0.3)
        exact = "global_clipnorm" not in numbers  # the norms of parts are summed in another order
        np.testing.assert_allclose(v, param.astype(dtype), rtol=0 if exact else 1e-5, atol=0)


def test_sgd_rounds_as_numpy_does_in_rows():
    start = random(0, 50, 3).astype(np.float32)
    v = get_variable("v", (50, 3), np.float32, start)
    ids, rows = np.array([7, 3, 7, 49]), random(1, 4, 3).astype(np.float32)
    optimizers.SGD(0.3).apply_gradients([(IndexedSlices(rows, ids), v)]).wait()
    start[[7, 3, 49]] -= np.float32(0.3) * np.array([rows[0] + rows[2], rows[1], rows[3]])
    np.testing.assert_array_equal(v, start)


@pytest.mark.parametrize("size", SIZES)
def test_adam(size):
    v = get_variable("v", size, np.float64, "zeros")
    optimizer = optimizers.Adam(0.1, beta_1=0.5, beta_2=0.8, epsilon=1e-3)
    m = s = expected = np.zeros(size)
    for t in range(1, 6):
        grad = random(t, size)
        optimizer.apply_gradients([(grad, v)])
        m, s = 0.5 * m + 0.5 * grad, 0.8 * s + 0.2 * grad**2
        root = np.sqrt(s / (1 - 0.8**t))
        expected = expected - 0.1 * (m / (1 - 0.5**t)) / (root + 1e-3)
    np.testing.assert_allclose(v, expected, rtol=1e-10, atol=1e-12)


def test_a_worker_reads_its_own_pushes_and_may_use_its_arrays_again():
    small, large = get_variable("s", 10, initializer=0), get_variable("l", 600_000, initializer=0)
    optimizer = optimizers.SGD(1.0)
    grads = np.zeros(10, np.float32), np.zeros(600_000, np.float32)
    for step in range(1, 31):
        for grad in grads:
            grad[:] = step
        optimizer.apply_gradients(zip(grads, (small, large), strict=True))
        for grad in grads:
            grad[:] = np.nan
        if step % 10 == 0:
            expected = -step * (step + 1) / 2
            for v in (small, large):
                value = v.read_value()
                assert value.min() == value.max() == expected


def test_the_result_is_in_the_order_of_the_gradients():
    a, b, c = (get_variable(n, 5000, initializer=0) for n in "abc")
    b.assign_add(1)
    c.assign_add(1)
    c.assign_add(1)
    pairs = [(np.ones(5000), c), (None, a), (np.ones(5000), b)]
    applied = optimizers.SGD(1).apply_gradients(pairs).result()
    assert applied.versions == (4, 3)
    np.testing.assert_array_equal(a, np.zeros(5000))
    assert a.version == 1


@pytest.mark.parametrize("pairs", [[], [(None, None)]])
def test_without_gradients(strategy, pairs):
    v = get_variable("v", 2)
    with pytest.raises(ValueError, match="no gradient"):
        optimizers.SGD(1).apply_gradients([(grad, v) for grad, _ in pairs])
    assert int(strategy.global_step) == 0


def test_bad_gradients_change_nothing(strategy):
    v = get_variable("v", 2, initializer=1.0)
    counts = get_variable("n", 2, int, initializer=1)
    optimizer = optimizers.SGD(1)
    good = np.ones(2, np.float32)
    for pairs, error in (
        ([(good, v), (good, v)], ValueError),
        ([(good, v), (np.ones(3), strategy.global_step)], ValueError),
        ([(good, v), ([1, 2], counts)], TypeError),
        ([(good, v), (good, counts)], TypeError),
        ([(good, v), (np.ones(2, complex), v)], (TypeError, ValueError)),
        ([(np.ones(2, object), v)], TypeError),
    ):
        with pytest.raises(error):
            optimizer.apply_gradients(pairs)
    np.testing.assert_array_equal(v, [1, 1])
    assert int(strategy.global_step) == 0


@pytest.mark.parametrize("size", [2, 300_000])
def test_an_optimizer_refuses_integers_and_nothing_is_applied(size):
    counts = get_variable("n", size, int, initializer=1)
    v = get_variable("v", size, initializer=1.0)
    work = optimizers.SGD(1).apply_gradients(
        [(np.ones(size, int), counts), (np.ones(size, np.float32), v)]
    )
    with pytest.raises(
        InvalidArgumentError, match=r"SGD cannot change variable 'n'.*need bfloat16"
    ):
        work.wait()
    np.testing.assert_array_equal(v, np.ones(size))
    np.testing.assert_array_equal(counts, np.ones(size))
    assert v.assign(5) == 2


@pytest.mark.parametrize("size", [2, 300_000, 2_000_000])
def test_bools_are_not_subtracted(size):
    flags = get_variable("f", size, bool, initializer=True)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="subtract from variable 'f' of dtype bool"):
            flags.assign_sub(np.ones(size, bool))
        np.testing.assert_array_equal(flags, np.ones(size, bool))
        assert flags.version == 1
    if flags.remotes[0].shared is not None:
        assert flags.remotes[0].shared.try_read(np.empty(size, bool)) == 1


def test_gradients_by_the_array_protocols():
    v = get_variable("v", 3, np.float64, "zeros")
    optimizer = optimizers.SGD(1.0)
    optimizer.apply_gradients([(memoryview(np.array([1.0, 2, 3])), v)])

    class Other:
        def __dlpack__(self, **kwargs):
            return np.array([10.0, 20, 30]).__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return (1, 0)

    optimizer.apply_gradients([(Other(), v)])
    np.testing.assert_array_equal(v, [-11, -22, -33])
