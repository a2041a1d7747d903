"""First values of variables."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategy import initializers
from strategy.initializers import InitialValue
from strategy.protocol.partition import whole

FLOAT = np.dtype(np.float32)


def initial_value(initializer, shape, dtype):
    """Return the first value of a variable that is not divided."""
    return InitialValue(initializer, shape, dtype).part(whole(shape)).reshape(shape)


# Shape, fan-in, fan-out.
FANS = [
    ((400, 250), 400, 250),
    ((90_000,), 90_000, 90_000),
    ((3, 3, 100, 60), 900, 540),
]
# Name, variance times the fan, mode of the fan.
KINDS = [
    ("glorot_uniform", 1, "both"),
    ("glorot_normal", 1, "both"),
    ("he_uniform", 2, "in"),
    ("he_normal", 2, "in"),
    ("lecun_uniform", 1, "in"),
    ("lecun_normal", 1, "in"),
]


@pytest.mark.parametrize(("name", "scale", "which"), KINDS)
@pytest.mark.parametrize(("shape", "fan_in", "fan_out"), FANS)
def test_statistics(name, scale, which, shape, fan_in, fan_out):
    value = getattr(initializers, name)(seed=1)(shape, np.dtype(np.float64))
    n = {"both": (fan_in + fan_out) / 2, "in": fan_in}[which]
    deviation = math.sqrt(scale / n)
    # The bound is five standard errors, so only a very unlucky seed exceeds it.
    close = 5 / math.sqrt(value.size)
    assert abs(value.mean()) < close * deviation
    assert value.std() == pytest.approx(deviation, rel=close)
    largest = abs(value).max() / deviation
    if name.endswith("uniform"):
        assert 0.99 * math.sqrt(3) < largest <= math.sqrt(3)
    else:
        assert largest > 3


def test_outward_connections():
    make = initializers.variance_scaling(1.0, "fan_out", "normal", seed=3)
    assert make((10, 40_000), FLOAT).std() == pytest.approx(1 / 200, rel=0.02)


def test_a_scalar_has_one_connection():
    assert initializers.glorot_uniform(seed=0)((), FLOAT).shape == ()


def test_seeds():
    def draw(make):
        return make((4, 5), FLOAT)

    same, again, other = (draw(initializers.he_normal(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(same, again)
    assert (same != other).all()
    fresh = initializers.he_normal()
    assert (draw(fresh) != draw(fresh)).all()
    names = [initial_value("glorot_uniform", (4, 5), FLOAT) for _ in range(2)]
    assert (names[0] != names[1]).all()


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(
        ["zeros", "ones", "glorot_uniform", "glorot_normal", "he_uniform", "he_normal"]
    ),
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "float64", "float16", "int32"]),
)
def test_names_give_the_shape_and_dtype_asked_for(name, shape, dtype):
    value = initial_value(name, shape, np.dtype(dtype))
    assert (value.shape, value.dtype.name) == (shape, dtype)
    assert value.flags.c_contiguous
    assert np.isfinite(value).all()
    if name in ("zeros", "ones"):
        assert (value == (name == "ones")).all()


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"unknown initializer 'xavier'.*glorot_uniform"):
        initial_value("xavier", (2,), FLOAT)


def test_a_callable_gets_shape_and_dtype():
    seen = []

    def make(shape, dtype):
        seen.append((shape, dtype))
        return np.arange(6.0).reshape(shape)

    value = initial_value(make, (2, 3), FLOAT)
    assert seen == [((2, 3), FLOAT)]
    assert value.dtype == FLOAT
    np.testing.assert_array_equal(value, [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    "given",
    [
        np.arange(6.0).reshape(3, 2).T,
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        [[0, 2, 4], [1, 3, 5]],
        np.arange(6, dtype=">i2").reshape(2, 3),
    ],
)
def test_arrays_of_any_layout(given):
    value = initial_value(given, (2, 3), FLOAT)
    assert value.flags.c_contiguous
    assert value.dtype == FLOAT
    np.testing.assert_array_equal(value, np.asarray(given))


@pytest.mark.parametrize("number", [3, 2.5, np.float64(-1), np.array(4), True])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_a_number_fills_any_shape(number, shape):
    value = initial_value(number, shape, FLOAT)
    np.testing.assert_array_equal(value, np.full(shape, number, FLOAT))


@pytest.mark.parametrize(
    "value", [np.zeros(3), np.zeros((3, 2)), [[1, 2]], lambda shape, dtype: np.zeros(5)]
)
def test_a_wrong_shape(value):
    with pytest.raises(ValueError, match=r"shape .* and the variable \(2, 3\)"):
        initial_value(value, (2, 3), FLOAT)


@pytest.mark.parametrize(
    ("make", "mean", "deviation", "low", "high"),
    [
        (initializers.random_uniform(-1, 3, seed=1), 1, 4 / math.sqrt(12), -1, 3),
        (initializers.random_normal(2, 0.5, seed=1), 2, 0.5, -1, 5),
        (initializers.truncated_normal(2, 0.5, seed=1), 2, 0.5 * 0.8796, 1, 3),
        (
            initializers.variance_scaling(100.0, "fan_in", "truncated_normal", seed=1),
            0, 1, -2 / 0.8796, 2 / 0.8796,
        ),
    ],
)  # fmt: skip
def test_random_values(make, mean, deviation, low, high):
    value = make((100, 2000), np.dtype(np.float64))
    close = 5 / math.sqrt(value.size)
    assert value.mean() == pytest.approx(mean, abs=close * deviation)
    assert value.std() == pytest.approx(deviation, rel=close)
    assert low <= value.min() < value.max() <= high
    part = make((100, 2000), FLOAT, partition_shape=(3, 2000), partition_offset=(50, 0))
    assert part.shape == (3, 2000)
    assert part.dtype == FLOAT
    assert not np.array_equal(part[0], value[0].astype(FLOAT))


@pytest.mark.parametrize("shape", [(30, 7), (7, 30), (3, 5, 8), (4, 4)])
def test_orthogonal_matrices(shape):
    value = initializers.orthogonal(3.0, seed=2)(shape, np.dtype(np.float64))
    assert value.shape == shape
    matrix = value.reshape(-1, shape[-1]) / 3
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    np.testing.assert_allclose(matrix.T @ matrix, np.eye(matrix.shape[1]), atol=1e-12)


def test_constants_and_identities():
    assert initial_value(initializers.constant(7), (2, 3), FLOAT).tolist() == [[7] * 3] * 2
    identity = initial_value(initializers.identity(2.0), (2, 3), FLOAT)
    assert identity.tolist() == [[2, 0, 0], [0, 2, 0]]
    assert initial_value("orthogonal", (3, 3), FLOAT).shape == (3, 3)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: initializers.orthogonal()((3,), FLOAT), "at least two axes"),
        (lambda: initializers.identity()((3, 3, 3), FLOAT), "has two axes"),
        (lambda: initializers.variance_scaling(1, "fan", "normal"), "'fan_in'"),
        (lambda: initializers.variance_scaling(1, "fan_in", "even"), "'uniform'"),
    ],
)
def test_what_cannot_be_made(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "int64"])
def test_integers_and_bools_are_zeros_by_default(dtype):
    assert not initial_value(None, (100, 3), np.dtype(dtype)).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_numbers_are_random_by_default(dtype):
    value = initial_value(None, (100, 3), np.dtype(dtype)).astype(float)
    assert 0 < abs(value).max() <= math.sqrt(6 / 103) * 1.01
    assert len(np.unique(value)) > 30


@pytest.mark.parametrize(
    ("given", "dtype", "error"),
    [
        (1.5, "int32", TypeError),
        (2.0, "int32", TypeError),
        (np.float32(2), "uint8", TypeError),
        ([300, 1.7], "int8", TypeError),
        ([1, 2.5], "bool", TypeError),
        (2, "bool", TypeError),
        (1j, "float32", TypeError),
        (1j, "bfloat16", TypeError),
        (np.ones(2, complex), "float64", TypeError),
        (np.ones(2, np.complex64), "bfloat16", TypeError),
        (["1", "2"], "float32", TypeError),
        ([1.0, None], "float32", TypeError),
        (np.array([1, 2], object), "float32", TypeError),
        (300, "int8", ValueError),
        (-1, "uint64", ValueError),
        (1 << 63, "int64", ValueError),
        (np.int64(1 << 33), "int32", ValueError),
        ([1, 300], "uint8", ValueError),
        (np.array([1, -1]), "uint16", ValueError),
        (np.array([1, 1 << 40], np.uint64), "int32", ValueError),
        (lambda shape, dtype: np.full(shape, 2.5), "int32", TypeError),
        (lambda shape, dtype: None, "float32", TypeError),
        (initializers.constant(1.5), "int32", TypeError),
        (initializers.constant(300), "int8", ValueError),
    ],
)
def test_values_that_do_not_fit_the_dtype(given, dtype, error):
    with pytest.raises(error, match=rf"(cannot become|does not fit) {dtype}, the dtype of"):
        initial_value(given, (2,), np.dtype(dtype))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (1.5, "bfloat16"),
        (1.5, "float16"),
        (True, "int8"),
        (1 << 70, "float32"),
        (np.int64(7), "uint8"),
        (np.float64(0.5), "bfloat16"),
        ([1.5, 2], "bfloat16"),
        ([127, -128], "int8"),
        (np.arange(2), "uint8"),
        (np.arange(2), "bfloat16"),
        (np.array([0, (1 << 64) - 1], np.uint64), "uint64"),
        (np.ones(2, ml_dtypes.bfloat16), "float16"),
        (np.array([1.5, 2.5], np.longdouble), "float16"),
        (lambda shape, dtype: np.full(shape, 0.5), "bfloat16"),
        (initializers.constant(0.5), "float16"),
        (initializers.constant(), "int32"),
        (initializers.random_normal(), "bfloat16"),
    ],
)
def test_values_that_fit_the_dtype(given, dtype):
    value = initial_value(given, (2,), np.dtype(dtype))
    assert value.dtype == dtype
    if not callable(given):
        np.testing.assert_array_equal(value.astype(float), np.broadcast_to(given, 2).astype(float))


def test_no_elements_of_any_dtype():
    assert initial_value([], (0,), np.dtype(np.int8)).dtype == np.int8
