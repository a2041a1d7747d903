"""Promises of parameter servers that 0.1 did not keep."""

import subprocess
import sys

import numpy as np
import pytest
from _cases.footprint import memory_growth

from strategy import ParameterServerStrategy, Variable, get_variable, optimizers


@pytest.fixture
def local():
    with ParameterServerStrategy(cluster_spec={}) as strategy:
        yield strategy


def table(strategy, name="w"):
    with strategy.scope():
        return get_variable(name, (100, 4), np.float64, "zeros")


STRATEGIES = """
import gc, os, re, threading
import numpy as np
import mpidist
from strategy import ParameterServerStrategy, get_variable, optimizers

def once():
    with ParameterServerStrategy() as strategy:
        with strategy.scope():
            w = get_variable("w", shape=(100_000,), initializer="zeros")
        optimizers.SGD(0.1).apply_gradients([(np.ones(100_000, "f4"), w)]).wait()

def kept():
    gc.collect()
    status = open("/proc/self/status").read()
    rss = int(re.search(r"VmRSS:\\s+(\\d+) kB", status)[1]) >> 10
    return rss, threading.active_count(), len(os.listdir("/proc/self/fd"))

with mpidist.Server({"ps": ["localhost:0"], "worker": ["localhost:0"]}, "worker", 0):
    for _ in range(5):
        once()
    before = kept()
    for _ in range(40):
        once()
    print(*(b - a for a, b in zip(before, kept())))
"""


def test_closed_strategies_leave_nothing_on_the_ps():
    output = subprocess.run(
        [sys.executable, "-c", STRATEGIES], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    mib, threads, handles = map(int, output.split())
    assert mib < 20
    assert threads <= 0
    assert handles <= 0


def test_iteration_over_a_variable_pulls_it_once(local, monkeypatch):
    w, pulls, read = table(local), [], Variable.read_value

    def counted(self, *args, **kwargs):
        pulls.append(self)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Variable, "read_value", counted)
    assert len(list(w)) == 100
    assert len(pulls) <= 1


def test_a_row_does_not_pull_the_whole_variable(local, monkeypatch):
    w = table(local)

    def whole(*_, **__):
        raise AssertionError("the whole variable is pulled")

    monkeypatch.setattr(Variable, "read_value", whole)
    w.scatter_update([3, -1 % 100], np.arange(8.0).reshape(2, 4))
    np.testing.assert_array_equal(w[3], np.arange(4.0))
    np.testing.assert_array_equal(w[-1], np.arange(4.0, 8.0))
    assert w[np.int64(3), 2] == w[3][2] == 2.0
    assert isinstance(w[3, 2], np.float64)


def test_an_index_means_what_it_means_to_numpy(local):
    w = table(local)
    w.assign(np.arange(400.0).reshape(100, 4))
    whole = w.numpy()
    for key in ((3, [0, 1]), (0, None, [0, 1]), (slice(2, 4), 1), (..., 2), None, True, [1, 3]):
        np.testing.assert_array_equal(w[key], whole[key])


def test_variables_are_keys_of_a_dict(local):
    v, w = table(local, "v"), table(local, "w")
    assert {v: 1, w: 2}[w] == 2


def test_a_dtype_of_tensorflow(local):
    class Float32:
        as_numpy_dtype = np.float32

    with local.scope():
        assert get_variable("w", (2,), Float32(), "zeros").dtype == np.float32


def test_rows_of_tensorflow_as_a_gradient(local):
    class IndexedSlices:
        values, indices = np.ones((2, 4)), np.array([3, 5])

    w = table(local)
    optimizers.SGD(1.0).apply_gradients([(IndexedSlices(), w)]).wait()
    assert w.numpy().sum(axis=1)[[3, 4, 5]].tolist() == [-4, 0, -4]


def test_a_learning_rate_can_be_changed(local):
    w, optimizer = table(local), optimizers.SGD(0.5)
    optimizer.apply_gradients([(np.ones((100, 4)), w)]).wait()
    optimizer.learning_rate = 0.25
    assert optimizer.learning_rate == 0.25
    optimizer.apply_gradients([(np.ones((100, 4)), w)]).wait()
    np.testing.assert_array_equal(w, np.full((100, 4), -0.75))


def test_optimizers_that_are_gone_leave_no_rules_on_the_ps(local):
    """Their schedules hold 100 KB each, so that a rule that stays shows in the memory."""
    w = table(local)

    def train(number):
        rates = np.full(12_500, 0.1 / (1 + number))
        sgd = optimizers.SGD(lambda step: float(rates[step]), name="sgd")
        sgd.apply_gradients([(np.ones((100, 4)), w)]).wait()

    assert memory_growth(train, 100) < 5e6
