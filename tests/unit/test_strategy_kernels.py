"""Update rules against float64 references."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategy.kernels import ADD, ASSIGN, OPTIMIZERS, SUB, Piece

SGD, ADAM = OPTIMIZERS["SGD"], OPTIMIZERS["Adam"]
ADAM_VALUES = {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}


def update(rule, param, grad, values, slots=(), step=1, cuts=()):
    """Apply a rule to the pieces between the cuts; the gradient is a copy, as on a server."""
    edges = [0, *sorted(cuts), param.size]
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        scratch = [np.full(stop - start, np.nan, param.dtype) for _ in range(rule.scratch)]
        parts = [slot[part] for slot in slots]
        rule.update(Piece(param[part], grad[part].copy(), parts, scratch, values, step))


def adam_reference(param, grads, learning_rate, beta_1, beta_2, epsilon):
    """Algorithm 1 of arXiv 1412.6980, in float64."""
    param = param.astype(np.float64)
    m, v = np.zeros_like(param), np.zeros_like(param)
    for t, grad in enumerate(grads, 1):
        g = grad.astype(np.float64)
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g * g
        m_hat, v_hat = m / (1 - beta_1**t), v / (1 - beta_2**t)
        param = param - learning_rate * m_hat / (np.sqrt(v_hat) + epsilon)
    return param


def random(seed, size, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-14), (np.float32, 1e-6)])
def test_sgd(dtype, rtol):
    param, grad = random(1, 1000, dtype), random(2, 1000, dtype)
    expected = param.astype(np.float64) - 0.3 * grad.astype(np.float64)
    update(SGD, param, grad, {"learning_rate": 0.3})
    np.testing.assert_allclose(param, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 3e-6)])
@pytest.mark.parametrize("change", [{}, {"beta_1": 0.0}, {"beta_2": 0.5}, {"epsilon": 0.1}])
def test_adam(dtype, tolerance, change):
    values = ADAM_VALUES | change
    param = random(3, 500, dtype)
    grads = [random(seed, 500, dtype) for seed in range(10, 30)]
    expected = adam_reference(param, grads, **values)
    slots = [np.zeros(500, dtype) for _ in ADAM.slots]
    for step, grad in enumerate(grads, 1):
        update(ADAM, param, grad, values, slots, step)
    np.testing.assert_allclose(param, expected, rtol=tolerance, atol=tolerance)


def test_the_first_step_of_adam_has_the_length_of_the_learning_rate():
    grad = np.array([1e-3, -5.0, 70.0])
    param = np.zeros(3)
    update(ADAM, param, grad, ADAM_VALUES, [np.zeros(3), np.zeros(3)])
    np.testing.assert_allclose(param, -0.01 * np.sign(grad), rtol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8, np.complex64])
def test_plain_changes(dtype):
    rng = np.random.default_rng(4)
    param, change = (rng.integers(0, 100, 50).astype(dtype) for _ in range(2))
    for rule, expected in ((ASSIGN, change), (ADD, param + change), (SUB, param - change)):
        result = param.copy()
        update(rule, result, change, {})
        np.testing.assert_array_equal(result, expected)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["SGD", "Adam"]),
    size=st.integers(1, 200),
    step=st.integers(1, 1000),
    dtype=st.sampled_from([np.float32, np.float64]),
    data=st.data(),
)
def test_pieces_give_the_bits_of_the_whole(name, size, step, dtype, data):
    cuts = data.draw(st.lists(st.integers(0, size), max_size=5))
    rule = OPTIMIZERS[name]
    grad = random(7, size, dtype)
    results = []
    for use in ((), cuts):
        param = random(8, size, dtype)
        slots = [abs(random(9, size, dtype)) for _ in rule.slots]
        update(rule, param, grad, ADAM_VALUES, slots, step, use)
        results.append([param, *slots])
    for whole, pieces in zip(*results, strict=True):
        np.testing.assert_array_equal(whole, pieces)
