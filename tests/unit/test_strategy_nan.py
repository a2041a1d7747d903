"""Gradients that are not finite."""

import logging

import ml_dtypes
import numpy as np
import pytest

from mpidist.errors import InvalidArgumentError
from strategy import IndexedSlices, ParameterServerStrategy, get_variable, optimizers
from strategy.server.parameter_server import LocalHost

BAD = [np.nan, np.inf, -np.inf]


@pytest.fixture
def make():
    hosts = []

    def build(**options):
        hosts.append(LocalHost())
        return ParameterServerStrategy(server=hosts[-1], **options)

    yield build
    for host in hosts:
        host.endpoint.close()


def pair(strategy, dtype=np.float32):
    with strategy.scope():
        return [get_variable(name, (6, 3), dtype, 1.0) for name in ("good", "bad")]


def gradients(kind, value, dtype):
    grad = np.ones((6, 3), dtype)
    grad[4, 2] = value
    if kind == "rows":
        return IndexedSlices(grad[3:5], [0, 2])
    return np.asfortranarray(grad) if kind == "strided" else grad


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("kind", ["whole", "strided", "rows"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=str)
def test_they_are_an_error_by_default(make, value, kind, dtype):
    strategy = make()
    good, bad = pair(strategy, dtype)
    grads = [(np.ones((6, 3), dtype), good), (gradients(kind, value, dtype), bad)]
    with pytest.raises(InvalidArgumentError, match=r"worker 0 .* elements: \['bad'\]; nothing was"):
        optimizers.SGD(1.0).apply_gradients(grads)
    for v in (good, bad):
        assert v.version == 1
        np.testing.assert_array_equal(v, np.ones((6, 3)))
    assert int(strategy.global_step) == 0


@pytest.mark.parametrize(
    ("dtype", "grad"),
    [
        (np.float32, np.full((6, 3), 1e300)),
        (np.float16, np.full((6, 3), 7e4, np.float32)),
        (np.float16, IndexedSlices(np.full((1, 3), 7e4, np.float32), [1])),
    ],
    ids=["float32", "float16", "rows"],
)
def test_what_the_variable_cannot_hold(make, dtype, grad):
    _, bad = pair(make(), dtype)
    with pytest.raises(InvalidArgumentError, match="NaN or infinite elements: "):
        optimizers.SGD(1.0).apply_gradients([(grad, bad)])
    assert bad.version == 1


def test_they_are_skipped(make, caplog):
    strategy = make(nan="skip")
    good, bad = pair(strategy)
    grads = [(np.ones((6, 3)), good), (gradients("whole", np.nan, np.float64), bad)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            applied = optimizers.SGD(1.0).apply_gradients(grads).result()
            assert (applied.contributed, applied.versions, applied.staleness) == (False, (), ())
    (record,) = caplog.records
    assert "elements: ['bad']; this push is skipped" in record.getMessage()
    assert strategy.nan.skipped == 3
    np.testing.assert_array_equal(good, np.ones((6, 3)))
    assert optimizers.SGD(1.0).apply_gradients(grads[:1]).result().contributed
    assert int(strategy.global_step) == 1


def test_they_pass(make):
    strategy = make(nan="pass")
    _, bad = pair(strategy)
    optimizers.SGD(1.0).apply_gradients([(gradients("whole", np.nan, np.float32), bad)]).wait()
    value = bad.read_value()
    assert np.isnan(value[4, 2])
    assert np.isfinite(value).sum() == 17
    clipping = optimizers.SGD(1.0, global_clipnorm=1.0)
    with pytest.raises(ValueError, match="gradient of variable 'bad' cannot be clipped"):
        clipping.apply_gradients([(gradients("whole", np.nan, np.float32), bad)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_ones_are_finite(make, dtype):
    """Their squares are not."""
    strategy = make()
    good, _ = pair(strategy, dtype)
    grad = np.full((6, 3), np.finfo(dtype).max, dtype)
    assert optimizers.SGD(0.5).apply_gradients([(grad, good)]).result().contributed


def test_other_dtypes_and_empty_ones(make):
    strategy = make()
    with strategy.scope():
        empty = get_variable("empty", (0, 3), initializer=0.0)
        v = get_variable("v", 3, initializer=0.0)
    grads = [(np.ones((0, 3)), empty), (np.array([1, 2, 3]), v)]
    assert optimizers.SGD(1.0).apply_gradients(grads).result().contributed
    np.testing.assert_array_equal(v, [-1, -2, -3])


def test_an_unknown_policy(make):
    with pytest.raises(ValueError, match=r"unknown nan policy 'ignore'.*'error', 'skip', 'pass'"):
        make(nan="ignore")
