"""Variables in a script: how they are made, and how they act as arrays."""

import ml_dtypes
import numpy as np
import pytest

import mpidist
import strategy as package
from mpidist.errors import ResourceExhaustedError
from strategy import ParameterServerStrategy, get_variable
from strategy.partitioners import FixedShardsPartitioner


@pytest.fixture(autouse=True, params=["auto", "rma", "p2p"])
def strategy(request):
    """Yield a strategy with an open scope."""
    cluster = {"ps": ["localhost:0"], "worker": ["localhost:0"]}
    with mpidist.Server(cluster, "worker", 0):
        strategy = ParameterServerStrategy(transport=request.param)
        with strategy.scope():
            yield strategy


def variable(value):
    return get_variable("v", initializer=np.asarray(value))


@pytest.mark.parametrize(
    ("arguments", "shape", "dtype"),
    [
        ({"shape": (2, 3)}, (2, 3), "float32"),
        ({"shape": [4]}, (4,), "float32"),
        ({"shape": 4}, (4,), "float32"),
        ({"shape": np.int64(4)}, (4,), "float32"),
        ({"shape": ()}, (), "float32"),
        ({"shape": (0, 2)}, (0, 2), "float32"),
        ({"shape": 2, "dtype": "int16", "initializer": "ones"}, (2,), "int16"),
        ({"shape": 2, "dtype": np.dtype(np.float64)}, (2,), "float64"),
        ({"shape": 2, "dtype": bool, "initializer": "zeros"}, (2,), "bool"),
        ({"initializer": 3}, (), "float32"),
        ({"initializer": 3, "dtype": int}, (), "int64"),
        ({"initializer": np.ones((2, 2))}, (2, 2), "float64"),
        ({"initializer": np.ones((2, 2)), "dtype": np.float16}, (2, 2), "float16"),
        ({"initializer": [1, 2]}, (2,), "int64"),
        ({"initializer": np.ones(2, ">f4")}, (2,), "float32"),
        ({"initializer": 5.0, "shape": (2,)}, (2,), "float32"),
        ({"initializer": lambda shape, dtype: np.ones(shape), "shape": 2}, (2,), "float32"),
        ({"initializer": None, "shape": 2}, (2,), "float32"),
        ({"initializer": None, "shape": 2, "dtype": int}, (2,), "int64"),
    ],
)
def test_shape_and_dtype(arguments, shape, dtype):
    v = get_variable("v", **arguments)
    assert (v.shape, v.dtype, v.name) == (shape, np.dtype(dtype), "v")
    value = v.read_value()
    assert (value.shape, value.dtype) == (shape, np.dtype(dtype))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs a shape"),
        ({"initializer": lambda shape, dtype: 1}, "needs a shape"),
        ({"shape": 2, "initializer": "nonsense"}, "unknown initializer"),
        ({"shape": 2, "initializer": np.ones(3)}, "shape"),
        ({"shape": (3, -1)}, r"cannot have the shape \(3, -1\)"),
    ],
)
def test_arguments_that_make_no_variable(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_variable("v", **arguments)


@pytest.mark.parametrize("name", ["", "a:b", "global_step", "taken"])
def test_names(name):
    get_variable("taken", 1)
    with pytest.raises(ValueError, match=f"{name!r}"):
        get_variable(name, 1)


UNFIT = (
    *(
        object,
        "U3",
        "S3",
        "V8",
        "f4,i4",
        "M8[s]",
        "m8[s]",
        "complex64",
        "complex128",
        np.longdouble,
    ),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
)


@pytest.mark.parametrize("dtype", UNFIT)
def test_dtypes_that_do_not_work(strategy, dtype):
    """The dtypes are refused before any task knows of the variable."""
    message = r"'v' cannot have the dtype .* bool, integers, bfloat16, float16, float32 and float64"
    with pytest.raises(TypeError, match=message):
        get_variable("v", 2, dtype)
    with pytest.raises(TypeError, match=message):
        get_variable("v", initializer=np.zeros(2, dtype))
    v = get_variable("v", 2, np.float32, "zeros")
    assert v.version == 1
    assert list(strategy.creator.by_name) == ["global_step", "v"]


FIT = ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "bfloat16", "f2", "f4", "f8", ">f4")


@pytest.mark.parametrize("dtype", FIT)
@pytest.mark.parametrize("size", [3, 300_000])
def test_dtypes_that_work(strategy, tmp_path, dtype, size):
    v = get_variable("v", size, dtype, "zeros")
    one, three = (np.full(size, value).astype(v.dtype) for value in (1, 3))
    v.assign(one)
    v.assign_add(one)
    v.assign_add(one)
    np.testing.assert_array_equal(v, three)
    path = strategy.save(str(tmp_path))
    v.assign(np.zeros_like(one))
    np.testing.assert_array_equal(v, np.zeros_like(one))
    strategy.restore(path)
    value = v.read_value()
    assert value.dtype == v.dtype
    np.testing.assert_array_equal(value, three)


@pytest.mark.parametrize("given", [{}, {"initializer": None}])
def test_variables_without_an_initializer(given):
    weights = get_variable("weights", (20, 30), **given).read_value()
    assert 0 < abs(weights).max() <= np.sqrt(6 / 50)
    assert len(np.unique(weights)) > 500
    for name in ("bool", "int8", "int64", "uint16"):
        assert not get_variable(name, (20, 30), name, **given).read_value().any()
    with pytest.raises(ValueError, match="needs a shape"):
        get_variable("w", **given)


@pytest.mark.parametrize("parts", [None, FixedShardsPartitioner(2)])
def test_first_values_that_do_not_fit(parts):
    with pytest.raises(TypeError, match=r"1.5 cannot become int32, the dtype of variable 'v'"):
        get_variable("v", 4, np.int32, 1.5, partitioner=parts)
    with pytest.raises(ValueError, match=r"300 does not fit int8, the dtype of variable 'w'"):
        get_variable("w", 4, np.int8, [1, 2, 3, 300], partitioner=parts)
    v = get_variable("v", 4, np.int32, [1, 2, 3, 4], partitioner=parts)
    np.testing.assert_array_equal(v, [1, 2, 3, 4])


@pytest.mark.parametrize("parts", [None, FixedShardsPartitioner(2)])
def test_a_variable_as_first_value(parts):
    v = get_variable("v", initializer=np.arange(6.0).reshape(3, 2), partitioner=parts)
    w = get_variable("w", initializer=v, partitioner=parts)
    assert (w.shape, w.dtype) == (v.shape, v.dtype)
    np.testing.assert_array_equal(get_variable("x", (3, 2), initializer=w), v)


@pytest.mark.parametrize("elements", [1 << 45, 1 << 60, 1 << 62])  # more than a process can address
def test_a_variable_that_is_far_too_large(elements):
    match = rf"ps 0 has no room for variable 'h' of {4 * elements} bytes: the host has"
    with pytest.raises(ResourceExhaustedError, match=match):
        get_variable("h", (elements,))
    np.testing.assert_array_equal(get_variable("h", 3, initializer=1.0), np.ones(3))


@pytest.mark.parametrize("bad", ["nonsense", np.ones(3), lambda shape, dtype: 1 / 0])
def test_a_variable_can_be_made_after_its_first_value_failed(bad):
    with pytest.raises((ValueError, ZeroDivisionError)):
        get_variable("v", 2, np.float64, initializer=bad)
    v = get_variable("v", 2, np.float64, initializer=np.array([3, 4]))
    np.testing.assert_array_equal(v.read_value(), [3, 4])
    assert v.version == 1


def test_trainable_and_repr():
    assert get_variable("a", 2).trainable
    b = get_variable("b", (2, 3), "float16", "ones", trainable=False)
    assert not b.trainable
    assert repr(b) == "<Variable 'b' float16[2, 3]>"


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_reading(size):
    value = np.arange(size, dtype=np.float32)
    v = variable(value)
    first, second = v.read_value(), v.numpy()
    np.testing.assert_array_equal(first, value)
    first[...] = -1  # changes only this copy
    np.testing.assert_array_equal(second, value)
    np.testing.assert_array_equal(v.read_value(consistent=False), value)
    out = np.full(size, np.nan, np.float32)
    assert v.read_value(out) is out
    np.testing.assert_array_equal(out, value)


def test_out_that_does_not_fit():
    v = variable(np.ones((2, 4), np.float32))
    read_only = np.empty((2, 4), np.float32)
    read_only.flags.writeable = False
    for out in (
        np.empty((4, 2), np.float32),
        np.empty((2, 4), np.float64),
        np.empty((4, 2), np.float32).T,
        np.empty((2, 8), np.float32)[:, ::2],
        np.empty((2, 4), ">f4"),
        read_only,
    ):
        with pytest.raises(ValueError, match="out must be a writable C-contiguous"):
            v.read_value(out)


def test_as_an_array():
    value = np.array([[1.0, -2.0], [3.0, 4.0]])
    v = variable(value)
    np.testing.assert_array_equal(np.asarray(v), value)
    assert np.asarray(v, np.float32).dtype == np.float32
    np.testing.assert_array_equal(np.array(v, copy=True), value)
    with pytest.raises(ValueError, match="always a copy"):
        np.array(v, copy=False)
    for result, expected in (
        (v + 1, value + 1),
        (1 - v, 1 - value),
        (v * v, value * value),
        (v @ value, value @ value),
        (value @ v, value @ value),
        (v / 2, value / 2),
        (-v, -value),
        (abs(v), abs(value)),
        (v**2, value**2),
        (v > 0, value > 0),
        (v == value, value == value),
        (np.exp(v), np.exp(value)),
        (np.maximum(v, 0), np.maximum(value, 0)),
        (np.add.reduce(v), value.sum(0)),
        (np.sum(v), value.sum()),
        (np.add(v, 1, out=np.empty((2, 2))), value + 1),
        (np.concatenate([v, v]), np.concatenate([value, value])),
        (v[0], value[0]),
        (v[:, 1], value[:, 1]),
        (v[v > 0], value[value > 0]),
        (np.array(list(v)), value),
    ):
        assert type(result) is type(expected)
        np.testing.assert_array_equal(result, expected)
    assert len(v) == 2


def test_as_a_number():
    v = variable(np.array(2.75))
    assert (float(v), int(v), v + 0.25) == (2.75, 2, 3.0)
    with pytest.raises(TypeError, match="without axes"):
        len(v)


def test_it_cannot_be_changed_as_if_it_were_local():
    v = variable(np.ones(2))
    with pytest.raises(TypeError):
        v += 1
    with pytest.raises(TypeError):
        np.add(v, 1, out=v)
    with pytest.raises(TypeError):
        v[0] = 5
    np.testing.assert_array_equal(v, [1, 1])


def test_operators_that_would_look_like_local_changes():
    v = variable([1.0, 2.0])
    with pytest.raises(TypeError, match=r"variable 'v' lives on a ps.*use assign_add"):
        v += 1
    with pytest.raises(TypeError, match="use assign_sub"):
        v -= np.ones(2)
    np.testing.assert_array_equal(v, [1, 2])


@pytest.mark.parametrize("kind", ["Variable", "ShardedVariable"])
@pytest.mark.parametrize(
    ("given", "options"),
    [
        ((), {}),
        ((np.zeros(3),), {}),
        ((np.zeros(3), "w"), {}),
        ((), {"initial_value": np.zeros(3), "name": "w"}),
        (([1.0, 2.0],), {"trainable": False, "dtype": np.float32}),
        ((lambda: np.zeros(3),), {"shape": (3,)}),
    ],
)
def test_a_variable_is_not_made_by_its_class(kind, given, options):
    """Unlike tf.Variable, these classes cannot be called. The error names the function to call."""
    made_by = r"not made by its class: call strategy.get_variable\(name, shape, dtype, init"
    with pytest.raises(TypeError, match=f"a {kind} lives on ps tasks and is {made_by}"):
        getattr(package, kind)(*given, **options)
