"""Gradients that travel in fewer bytes."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import pytest
from _cases.servers import Cluster
from hypothesis import given
from hypothesis import strategies as st

from mpidist import errors
from strategy import IndexedSlices, get_variable, optimizers
from strategy.partitioners import FlatPartitioner
from strategy.protocol.push_message import scattered

# One element, one message's worth, one that is staged whole and as halves, several blocks.
SIZES = [1, 1000, 40_000, 700_001]
HALVES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture
def make():
    with ExitStack() as stack:
        yield lambda **options: Cluster(stack, **options)


def gradient(size, seed=0):
    return np.random.default_rng((seed, size)).standard_normal(size)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compression", HALVES)
def test_halves(make, compression, dtype, near):
    strategy = make(servers=2, near=near).worker(0, compression=compression)
    with strategy.scope():
        made = [get_variable(f"v{n}", size, dtype, 0.0) for n, size in enumerate(SIZES)]
    grads = [gradient(size) for size in SIZES]
    applied = optimizers.SGD(1.0).apply_gradients(zip(grads, made, strict=True)).result()
    assert applied.versions == (2,) * len(SIZES)
    for grad, v in zip(grads, made, strict=True):
        expected = -grad.astype(dtype).astype(HALVES[compression]).astype(dtype)
        np.testing.assert_array_equal(v, expected)
    made[3].assign(grads[3])  # only gradients are compressed
    np.testing.assert_array_equal(made[3], grads[3].astype(dtype))


def test_what_float16_cannot_hold(make):
    strategy = make().worker(0, compression="fp16")
    with strategy.scope():
        v = get_variable("v", 3, np.float32, 0.0)
    optimizers.SGD(1.0).apply_gradients([(np.array([1e30, -1e6, 2.0]), v)]).wait()
    np.testing.assert_array_equal(v, [-65504, 65504, -2])


@pytest.mark.parametrize("compression", [*HALVES, ("topk", 0.1)], ids=str)
def test_what_is_not_compressed(make, compression):
    """Variables in halves; of the largest elements, rows."""
    strategy = make().worker(0, compression=compression)
    with strategy.scope():
        half = get_variable("half", 4, np.float16, 0.0)
        table = get_variable("table", (6, 2), np.float64, 0.0)
    rows = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    grads = [(np.full(4, 0.5), half), (IndexedSlices(rows, [4, 1, 4]), table)]
    optimizers.SGD(1.0).apply_gradients(grads).wait()
    np.testing.assert_array_equal(half, np.full(4, -0.5))
    np.testing.assert_array_equal(table.gather([1, 4]), [[-3, -4], [-6, -8]])
    assert int(strategy.global_step) == 1


@pytest.mark.parametrize("near", [True, False])
def test_the_largest_elements_and_what_stays_behind(make, near):
    strategy = make(near=near).worker(0, compression=("topk", 0.01))
    with strategy.scope():
        made = [get_variable(f"v{n}", size, np.float64, 0.0) for n, size in enumerate(SIZES)]
    optimizer = optimizers.SGD(1.0)
    total = [np.zeros(size) for size in SIZES]
    for step in range(5):
        grads = [gradient(size, step) for size in SIZES]
        before = [v.read_value() for v in made]
        optimizer.apply_gradients(zip(grads, made, strict=True)).wait()
        for n, size in enumerate(SIZES):
            total[n] += grads[n]
            count = max(1, round(0.01 * size))
            sent = before[n] - made[n].read_value()
            assert np.count_nonzero(sent) == count
            # What has not been sent is smaller, and is kept.
            behind = total[n] + made[n].read_value()
            assert np.abs(behind).max() <= np.abs(sent[sent != 0]).min() + 1e-12
    for v, size in zip(made, SIZES, strict=True):
        assert v.version == 6
        behind = strategy.compressor._behind[v.name]
        np.testing.assert_allclose(-v.read_value() + behind, total[SIZES.index(size)], atol=1e-12)


def test_all_elements(make):
    strategy = make(servers=2).worker(
        0, compression=("topk", 1), variable_partitioner=FlatPartitioner(2)
    )
    with strategy.scope():
        v = get_variable("v", (5, 3), np.float32, 0.0)
        empty = get_variable("empty", (0, 3), np.float32, 0.0)
    grads = [(np.arange(15.0).reshape(5, 3), v), (np.ones((0, 3)), empty)]
    applied = optimizers.Adam(0.1).apply_gradients(grads).result()
    assert applied.versions == ((2, 2), 2)
    reference = make().worker(0)
    with reference.scope():
        w = get_variable("v", (5, 3), np.float32, 0.0)
    optimizers.Adam(0.1).apply_gradients([(grads[0][0], w)]).wait()
    np.testing.assert_array_equal(v, w)


@pytest.mark.parametrize("compression", [*HALVES, ("topk", 0.5)], ids=str)
@pytest.mark.parametrize("size", [8, 700_000])
def test_means_of_compressed_gradients(make, compression, size):
    cluster = make(workers=2)
    results = [None, None]

    def train(index):
        strategy = cluster.worker(index, mode="sync", compression=compression)
        with strategy.scope():
            v = get_variable("v", size, np.float32, 0.0)
        grad = np.zeros(size, np.float32)
        grad[index::2] = 2.0 + index
        optimizers.SGD(1.0).apply_gradients([(grad, v)]).wait()
        results[index] = v.read_value()

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        np.testing.assert_array_equal(result[::2], np.full(size // 2, -1.0))
        np.testing.assert_array_equal(result[1::2], np.full(size // 2, -1.5))


def test_workers_that_compress_otherwise(make):
    cluster = make(workers=2)
    cluster.worker(0, compression=("topk", 0.5))
    for other in (None, "fp16", ("topk", 0.25)):
        with pytest.raises(errors.InvalidArgumentError, match=r"compression topk, 0\.5"):
            cluster.worker(1, compression=other)
        cluster = make(workers=2)
        cluster.worker(0, compression=("topk", 0.5))


@pytest.mark.parametrize(
    "wrong", ["zip", "topk", ("topk",), ("topk", 0), ("topk", 1.5), ("topk", "0.1"), 3, ("fp16", 1)]
)
def test_unknown_compressions(make, wrong):
    with pytest.raises(ValueError, match=r"unknown compression|a share of the elements"):
        make().worker(0, compression=wrong)


@given(st.data(), st.sampled_from([0, 1, 131_072, 131_073, 300_000]))
def test_scattered_blocks(data, size):
    places = data.draw(
        st.lists(st.integers(0, max(size - 1, 0)), max_size=min(size, 9), unique=True)
    )
    places = np.array(sorted(places), np.int64)
    values = np.arange(1.0, len(places) + 1)
    blocks = [block.copy() for block in scattered(places, values, size)]
    expected = np.zeros(size)
    expected[places] = values
    np.testing.assert_array_equal(np.concatenate(blocks), expected)
    assert [len(block) for block in blocks[:-1]] == [131_072] * (len(blocks) - 1)


def test_a_gradient_that_comes_too_late_leaves_nothing_behind(make):
    cluster = make(workers=2)
    strategies = [
        cluster.worker(index, mode="sync", backup_workers=1, compression=("topk", 0.5))
        for index in range(2)
    ]
    made = []
    for strategy in strategies:
        with strategy.scope():
            made.append(get_variable("v", 2, np.float64, 0.0))

    def step(index, *values):
        pairs = [(np.array(values), made[index])]
        return optimizers.SGD(1.0).apply_gradients(pairs).result().contributed

    assert step(1, 4.0, 1.0)  # 1 stays behind
    assert step(0, 0.0, 0.0) is False  # it comes to the first step, which is over
    assert step(0, 1.0, 8.0)  # 1 stays behind
    assert step(1, 50.0, 70.0) is False
    np.testing.assert_array_equal(made[0], [-4, -8])
    assert step(1, 3.0, 1.0)  # with the 1 of its first step, and nothing of the second
    np.testing.assert_array_equal(made[0], [-7, -8])
    assert step(1, 0.0, 0.0)
    np.testing.assert_array_equal(made[0], [-7, -10])


@pytest.mark.parametrize("names", ["ab", "aa"], ids=["two variables", "one variable"])
def test_what_threads_push_is_applied_or_left_for_the_next_push(make, names):
    size, pushes = 2000, 60
    strategy = make().worker(0, compression=("topk", 0.1), nan="pass")
    with strategy.scope():
        variables = {name: get_variable(name, size, np.float64, 0.0) for name in set(names)}
    optimizer, start = optimizers.SGD(1.0), threading.Barrier(2)

    def push(name):
        start.wait(30)
        for _ in range(pushes):
            optimizer.apply_gradients([(np.ones(size), variables[name])])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(push, name) for name in names]:
                future.result(60)
    finally:
        sys.setswitchinterval(interval)
    # Gradients of zero make room for what is left behind.
    for _ in range(20):
        for variable in variables.values():
            optimizer.apply_gradients([(np.zeros(size), variable)]).wait()
    for name, variable in variables.items():
        np.testing.assert_array_equal(variable, np.full(size, -float(pushes * names.count(name))))


def bad(step):
    raise RuntimeError("bad schedule")


@pytest.mark.parametrize("later", ["nothing", "pushes"])
def test_a_push_that_fails_on_the_server_does_not_count(make, later):
    strategy = make().worker(0, compression=("topk", 0.25))
    with strategy.scope():
        v = get_variable("v", 4, np.float64, 0.0)
    sgd = optimizers.SGD(1.0)
    given = np.array([4.0, 3.0, 2.0, 1.0])
    sgd.apply_gradients([(given, v)]).wait()
    failing = optimizers.SGD(bad, name="bad").apply_gradients([(np.ones(4), v)])
    if later == "pushes":  # before the worker knows
        sgd.apply_gradients([(np.zeros(4), v)])
    with pytest.raises(errors.InvalidArgumentError, match="bad schedule"):
        failing.wait()
    for _ in range(8):
        sgd.apply_gradients([(np.zeros(4), v)]).wait()
    np.testing.assert_array_equal(v, -given)
