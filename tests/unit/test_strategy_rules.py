"""Update rules against float64 references, in NumPy and compiled."""

import itertools
import tracemalloc
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategy import optimizers
from strategy.server.row_changes import change_rows
from strategy.shared.kernels import ADD, ASSIGN, SUB, Piece
from strategy.shared.rules import RULES

# Each kind with the numbers that lead to different steps.
CONFIGURATIONS = [
    optimizers.SGD(0.3),
    optimizers.SGD(0.3, weight_decay=0.1),
    optimizers.SGD(0.1, momentum=0.9),
    optimizers.SGD(0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    optimizers.Adagrad(0.1),
    optimizers.Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-3, weight_decay=0.1),
    optimizers.RMSprop(0.01),
    optimizers.RMSprop(0.01, rho=0.5, momentum=0.9, weight_decay=0.1),
    optimizers.RMSprop(0.01, centered=True),
    optimizers.RMSprop(0.01, rho=0.8, momentum=0.5, centered=True),
    optimizers.Adam(0.01),
    optimizers.Adam(0.01, beta_1=0.0),
    optimizers.Adam(0.01, beta_2=0.5, epsilon=0.1, weight_decay=0.1),
    optimizers.AdamW(0.01, weight_decay=0.1),
    optimizers.AdamW(0.01, weight_decay=0.0),
    optimizers.Ftrl(0.1),
    optimizers.Ftrl(0.1, l1=0.1, l2=0.2, l2_shrinkage=0.01, beta=0.5),
]
CASES = pytest.mark.parametrize("optimizer", CONFIGURATIONS, ids=repr)


def sgd(p, grads, learning_rate, momentum, nesterov, weight_decay):
    velocity = 0.0
    for g in grads:
        g = g + weight_decay * p
        velocity = momentum * velocity + g
        p = p - learning_rate * (g + momentum * velocity if nesterov else velocity)
    return p


def adagrad(p, grads, learning_rate, initial_accumulator_value, epsilon, weight_decay):
    total = initial_accumulator_value
    for g in grads:
        g = g + weight_decay * p
        total = total + g**2
        p = p - learning_rate * g / (np.sqrt(total) + epsilon)
    return p


def rmsprop(p, grads, learning_rate, rho, momentum, epsilon, centered, weight_decay):
    squares = mean = velocity = 0.0
    for g in grads:
        g = g + weight_decay * p
        squares = rho * squares + (1 - rho) * g**2
        mean = rho * mean + (1 - rho) * g
        variance = np.maximum(squares - centered * mean**2, 0)
        velocity = momentum * velocity + g / (np.sqrt(variance) + epsilon)
        p = p - learning_rate * velocity
    return p


def adam(p, grads, learning_rate, beta_1, beta_2, epsilon, weight_decay, decoupled=False):
    """Algorithm 1 of arXiv 1412.6980; decoupled: algorithm 2 of arXiv 1711.05101."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        if decoupled:
            p = p - learning_rate * weight_decay * p
        else:
            g = g + weight_decay * p
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        m_hat, v_hat = m / (1 - beta_1**t), v / (1 - beta_2**t)
        p = p - learning_rate * m_hat / (np.sqrt(v_hat) + epsilon)
    return p


def ftrl(p, grads, learning_rate, initial_accumulator_value, l1, l2, l2_shrinkage, beta):
    """As Keras writes it, with the learning rate power -1/2."""
    n, z = initial_accumulator_value, 0.0
    for g in grads:
        new = n + g**2
        z = z + g + 2 * l2_shrinkage * p - (np.sqrt(new) - np.sqrt(n)) / learning_rate * p
        n = new
        quadratic = np.sqrt(n) / learning_rate + 2 * (l2 + beta / (2 * learning_rate))
        p = np.where(np.abs(z) > l1, (np.sign(z) * l1 - z) / quadratic, 0)
    return p


REFERENCES = {
    "SGD": sgd,
    "Adagrad": adagrad,
    "RMSprop": rmsprop,
    "Adam": adam,
    "AdamW": lambda *args, **values: adam(*args, **values, decoupled=True),
    "Ftrl": ftrl,
}


def random(seed, size, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def kind_of(optimizer):
    return type(optimizer).__name__


def slots_of(rule, size, dtype):
    return [np.full(size, rule.initial.get(name, 0.0), dtype) for name in rule.slots]


def update(rule, param, grad, values, slots=(), step=1, cuts=()):
    """Apply a rule to the pieces between the cuts; the gradient must stay as it is."""
    edges = [0, *sorted(cuts), param.size]
    grad.flags.writeable = False
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        scratch = [np.full(stop - start, np.nan, param.dtype) for _ in range(rule.scratch)]
        parts = [slot[part] for slot in slots]
        rule.update(Piece(param[part], grad[part], parts, scratch, values, step))


def trained(rule, values, dtype, steps=20, size=500, first=()):
    """The variable, which begins with given values, and the slots after some steps."""
    param, slots = random(3, size, dtype), slots_of(rule, size, dtype)
    param[: len(first)] = first
    for step in range(1, steps + 1):
        update(rule, param, random(10 + step, size, dtype), values, slots, step)
    return [param, *slots]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
@CASES
def test_references(optimizer, dtype, tolerance):
    kind = kind_of(optimizer)
    param, *_ = trained(RULES[kind](optimizer.values), optimizer.values, dtype)
    start, *grads = [random(seed, 500, dtype).astype(float) for seed in (3, *range(11, 31))]
    expected = REFERENCES[kind](start, grads, **optimizer.values)
    np.testing.assert_allclose(param, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@CASES
def test_compiled_rules_give_the_bits_of_numpy(optimizer, dtype):
    from strategy.shared.fused import fused

    kind, values = kind_of(optimizer), optimizer.values
    with np.errstate(invalid="ignore"):
        results = [
            trained(make(values), values, dtype, first=(np.inf, -np.inf, np.nan))
            for make in (RULES[kind], lambda v: fused(kind, v))
        ]
    for plain, compiled in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, compiled)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(
    ("optimizer", "name", "options"),
    [
        (optimizers.SGD(0.1, weight_decay=0.1), "SGD", {"lr": 0.1, "weight_decay": 0.1}),
        (optimizers.SGD(0.1, momentum=0.9), "SGD", {"lr": 0.1, "momentum": 0.9}),
        (
            optimizers.SGD(0.1, momentum=0.9, nesterov=True),
            "SGD",
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        ),
        (
            optimizers.Adagrad(0.1),
            "Adagrad",
            {"lr": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-7},
        ),
        (
            optimizers.RMSprop(0.1, 0.9, 0.5, 1e-3, True),
            "RMSprop",
            {"lr": 0.1, "alpha": 0.9, "momentum": 0.5, "eps": 1e-3, "centered": True},
        ),
        (
            optimizers.Adam(0.1, weight_decay=0.01),
            "Adam",
            {"lr": 0.1, "eps": 1e-7, "weight_decay": 0.01},
        ),
        (
            optimizers.AdamW(0.1, weight_decay=0.2),
            "AdamW",
            {"lr": 0.1, "eps": 1e-7, "weight_decay": 0.2},
        ),
    ],
    ids=repr,
)
def test_torch_takes_the_same_steps(optimizer, name, options):
    import torch

    param, *_ = trained(RULES[name](optimizer.values), optimizer.values, np.float64)
    theirs = torch.tensor(random(3, 500))
    peer = getattr(torch.optim, name)([theirs], **options)
    for step in range(20):
        theirs.grad = torch.tensor(random(11 + step, 500))
        peer.step()
    np.testing.assert_allclose(param, theirs.numpy(), rtol=1e-9, atol=1e-9)


def test_the_first_step_of_adam_has_the_length_of_the_learning_rate():
    grad, rule = np.array([1e-3, -5.0, 70.0]), RULES["Adam"](optimizers.Adam(0.01).values)
    param = np.zeros(3)
    update(rule, param, grad, optimizers.Adam(0.01).values, slots_of(rule, 3, float))
    np.testing.assert_allclose(param, -0.01 * np.sign(grad), rtol=1e-3)


def test_ftrl_leaves_weights_of_little_use_at_zero():
    rule, values = RULES["Ftrl"], optimizers.Ftrl(0.1, l1=1.0).values
    param, slots = np.zeros(2), slots_of(rule(values), 2, float)
    for step in range(1, 4):
        update(rule(values), param, np.array([0.1, 1.0]), values, slots, step)
    assert param[0] == 0
    assert param[1] < 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8, np.complex64])
def test_plain_changes(dtype):
    rng = np.random.default_rng(4)
    param, change = (rng.integers(0, 100, 50).astype(dtype) for _ in range(2))
    for rule, expected in ((ASSIGN, change), (ADD, param + change), (SUB, param - change)):
        result = param.copy()
        update(rule, result, change, {})
        np.testing.assert_array_equal(result, expected)


@settings(deadline=None, max_examples=60)
@given(
    optimizer=st.sampled_from(CONFIGURATIONS),
    size=st.integers(1, 200),
    step=st.integers(1, 1000),
    dtype=st.sampled_from([np.float32, np.float64]),
    data=st.data(),
)
def test_pieces_give_the_bits_of_the_whole(optimizer, size, step, dtype, data):
    cuts = data.draw(st.lists(st.integers(0, size), max_size=5))
    rule = RULES[kind_of(optimizer)](optimizer.values)
    grad = random(7, size, dtype)
    results = []
    for use in ((), cuts):
        param = random(8, size, dtype)
        slots = [abs(random(9, size, dtype)) for _ in rule.slots]
        update(rule, param, grad, optimizer.values, slots, step, use)
        results.append([param, *slots])
    for whole, pieces in zip(*results, strict=True):
        np.testing.assert_array_equal(whole, pieces)


@pytest.mark.parametrize("width", [1, 40, 20_000])
def test_rows_of_any_width_take_little_memory(width):
    optimizer, rows = optimizers.Adam(0.01), 6_000_000 // width
    tables = [np.zeros((rows, width), np.float32) for _ in range(3)]
    flat = [np.zeros(rows * width, np.float32) for _ in tables]
    ids, grad = np.arange(rows), np.ones(rows * width, np.float32)
    rule = RULES["Adam"](optimizer.values)
    for step in (1, 2):
        update(rule, flat[0], grad, optimizer.values, flat[1:], step)
    change_rows(rule, tables, ids, grad, optimizer.values, 1)  # compiles
    tracemalloc.start()
    try:
        change_rows(rule, tables, ids, grad, optimizer.values, 2)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 << 20
    for table, expected in zip(tables, flat, strict=True):
        np.testing.assert_array_equal(table.reshape(-1), expected)
