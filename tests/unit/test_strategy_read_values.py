"""Several variables pulled at once."""

import threading
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import pytest
from _cases.servers import Cluster, variable

from mpidist import errors
from strategy import get_variable, optimizers, read_values
from strategy.client import pull as client_pull
from strategy.client.connection import Connection
from strategy.partitioners import fixed_size_partitioner
from strategy.proto import parameter_server_pb2 as pb

LARGE = client_pull.SMALL_BYTES // 8  # the fewest elements of 8 bytes that are not small
SHAPES = [(), (0, 3), (5,), (3, 4), (LARGE - 1,), (LARGE,), (3, 7)]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_]


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


def some(strategy):
    """Return variables of all kinds and their values."""
    made, values = [], []
    random = np.random.default_rng(0)
    for dtype in DTYPES:
        for number, shape in enumerate(SHAPES):
            value = random.integers(0, 2, shape).astype(dtype)
            with strategy.scope():
                partitioner = fixed_size_partitioner(2, axis=1) if number == 6 else None
                name = f"{np.dtype(dtype).name}_{number}"
                made.append(get_variable(name, shape, dtype, value, partitioner=partitioner))
            values.append(value)
    return made, values


@pytest.fixture
def asked(make, monkeypatch):
    """Return a list that records the methods called on servers."""
    methods = []
    start = Connection.start

    def noted(self, method, message, *arguments, **options):
        many = f" {len(message.variables)}" if method == "ReadMany" else ""
        methods.append(f"{method}{many}")
        return start(self, method, message, *arguments, **options)

    monkeypatch.setattr(Connection, "start", noted)
    return methods


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("consistent", [True, False])
def test_as_one_by_one(make, asked, near, servers, consistent):
    strategy = make(servers=servers, near=near).worker(0)
    made, values = some(strategy)
    asked.clear()
    found = read_values(made, consistent=consistent)
    if near:
        assert asked == []
    else:
        assert sum(method.startswith("ReadMany") for method in asked) == servers
        # Only the variables of LARGE elements with the two dtypes of 8 bytes are large.
        assert asked.count("Read") == 2
    assert all(type(array) is np.ndarray for array in found)
    for array, value, v in zip(found, values, made, strict=True):
        assert array.dtype == v.dtype
        assert array.tobytes() == value.tobytes()
        assert array.flags.writeable
        assert v.version == (1 if len(v.remotes) == 1 else (1, 1))


@pytest.mark.parametrize("near", [True, False])
def test_into_arrays_that_are_there(make, near):
    strategy = make(near=near).worker(0)
    made, values = some(strategy)
    out = [np.empty(v.shape, v.dtype) for v in made]
    out[3] = None
    found = read_values(iter(made), out)
    for array, given, value in zip(found, out, values, strict=True):
        assert given is None or array is given
        assert array.tobytes() == value.tobytes()


def test_what_cannot_be_filled(make):
    strategy = make().worker(0)
    v = variable(strategy, "v", 3)
    with pytest.raises(ValueError, match="out has 2 arrays for 1 variables"):
        read_values([v], [None, None])
    with pytest.raises(ValueError, match=r"out must be a writable .* for variable 'v'"):
        read_values([v], [np.empty(4)])
    with pytest.raises(TypeError, match="takes variables, not 3"):
        read_values([v, 3])
    assert read_values([]) == []


@pytest.mark.parametrize("near", [True, False])
def test_own_pushes_are_seen(make, near):
    strategy = make(servers=2, near=near).worker(0)
    made = [variable(strategy, f"v{i}", 3, i) for i in range(20)]
    optimizers.SGD(1.0).apply_gradients([(np.ones(3), v) for v in made])
    for i, value in enumerate(read_values([*made, made[0]])):
        np.testing.assert_array_equal(value, np.full(3, i % 20 - 1.0))
    assert {v.version for v in made} == {2}


def test_one_that_is_not_there(make):
    strategy = make(near=False).worker(0)
    v = variable(strategy, "v", 2)
    (connection,) = strategy._connections
    with pytest.raises(errors.Error, match="index out of range"):
        connection.call("ReadMany", pb.ReadManyRequest(variables=[99]))
    np.testing.assert_array_equal(v, [0, 0])


def test_pulls_beside_pushes_are_whole(make):
    cluster = make(near=False)
    writer, reader = cluster.worker(0), cluster.worker(1)
    written = [variable(writer, f"v{i}", 300) for i in range(10)]
    wanted = [variable(reader, f"v{i}", 300) for i in range(10)]
    sgd, done = optimizers.SGD(1.0), threading.Event()

    def push():
        for _ in range(100):
            sgd.apply_gradients([(-np.ones(300), v) for v in written]).wait()
        done.set()

    thread = threading.Thread(target=push)
    thread.start()
    while not done.is_set():
        for v, value in zip(wanted, read_values(wanted), strict=True):
            np.testing.assert_array_equal(value, np.full(300, v.version - 1.0))
    thread.join(30)
