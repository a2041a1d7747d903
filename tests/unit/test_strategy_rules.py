"""Update rules against float64 references, in NumPy and compiled."""

import itertools
import tracemalloc
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategy import optimizers
from strategy.optimizers import BY_NAME
from strategy.rules import ADD, ASSIGN, SUB, Kind, Rule, Update, on_arrays
from strategy.server.shard import change_rows

# Each optimizer with the hyperparameters that change its update steps.
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
    optimizers.Adam(0.01, amsgrad=True),
    optimizers.AdamW(0.01, beta_2=0.6, amsgrad=True),
    optimizers.Adafactor(0.01),
    optimizers.Adafactor(0.5, -0.5, 1e-3, 0.1, 0.5, weight_decay=0.1),
    optimizers.Adadelta(1.0),
    optimizers.Adadelta(0.5, rho=0.5, epsilon=1e-3, weight_decay=0.1),
    optimizers.Adamax(0.01),
    optimizers.Adamax(0.01, beta_1=0.5, beta_2=0.8, epsilon=1e-3, weight_decay=0.1),
    optimizers.Nadam(0.01),
    optimizers.Nadam(0.01, beta_1=0.999, momentum_decay=0.5, weight_decay=0.1),
    optimizers.Lamb(0.01),
    optimizers.Lamb(0.1, beta_1=0.5, beta_2=0.8, epsilon=1e-3, weight_decay=0.1),
    optimizers.Lion(0.01),
    optimizers.Lion(0.01, beta_1=0.5, beta_2=0.8, weight_decay=0.1),
    optimizers.Ftrl(0.1),
    optimizers.Ftrl(0.1, l1=0.1, l2=0.2, l2_shrinkage=0.01, beta=0.5),
]
CASES = pytest.mark.parametrize("optimizer", CONFIGURATIONS, ids=repr)
ELEMENTWISE = pytest.mark.parametrize(
    "optimizer", [one for one in CONFIGURATIONS if not one.needs_all], ids=repr
)


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


def adam(p, grads, learning_rate, beta_1, beta_2, epsilon, weight_decay, amsgrad, decoupled=False):
    """Run algorithm 1 of arXiv 1412.6980 or, if decoupled, algorithm 2 of arXiv 1711.05101."""
    m = v = largest = 0.0
    for t, g in enumerate(grads, 1):
        if decoupled:
            p = p - learning_rate * weight_decay * p
        else:
            g = g + weight_decay * p
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        largest = np.maximum(largest, v) if amsgrad else v
        m_hat, v_hat = m / (1 - beta_1**t), largest / (1 - beta_2**t)
        p = p - learning_rate * m_hat / (np.sqrt(v_hat) + epsilon)
    return p


def adadelta(p, grads, learning_rate, rho, epsilon, weight_decay):
    """Run algorithm 1 of arXiv 1212.5701."""
    squares = deltas = 0.0
    for g in grads:
        g = g + weight_decay * p
        squares = rho * squares + (1 - rho) * g**2
        delta = -np.sqrt(deltas + epsilon) / np.sqrt(squares + epsilon) * g
        deltas = rho * deltas + (1 - rho) * delta**2
        p = p + learning_rate * delta
    return p


def adafactor(
    p, grads, learning_rate, beta_2_decay, epsilon_1, epsilon_2, clip_threshold, weight_decay
):
    """Run algorithm 5 of arXiv 1804.04235, with the constants of torch."""
    epsilon_1 = epsilon_1 or np.finfo(p.dtype).eps
    rows = columns = squares = 0.0
    for t, g in enumerate(grads, 1):
        g, decay = g.astype(float), 1 - t**beta_2_decay
        if g.ndim > 1:
            rows = decay * rows + (1 - decay) * np.mean(g**2, -1)
            columns = decay * columns + (1 - decay) * np.mean(g**2, -2)
            total = np.maximum(rows.mean(-1)[..., None, None], epsilon_1)
            squares = rows[..., :, None] * columns[..., None, :] / total
        else:
            squares = decay * squares + (1 - decay) * g**2
        step = g / np.sqrt(np.maximum(squares, epsilon_1**2))
        step = step / max(1, np.sqrt(np.mean(step**2)) / clip_threshold)
        size = max(epsilon_2, np.sqrt(np.mean(p.astype(float) ** 2)))
        rate = min(learning_rate, 1 / np.sqrt(t))
        p = p - learning_rate * weight_decay * p - rate * size * step
    return p


def adamax(p, grads, learning_rate, beta_1, beta_2, epsilon, weight_decay):
    """Run algorithm 2 of arXiv 1412.6980."""
    m = u = 0.0
    for t, g in enumerate(grads, 1):
        g = g + weight_decay * p
        m = beta_1 * m + (1 - beta_1) * g
        u = np.maximum(beta_2 * u, np.abs(g) + epsilon)
        p = p - learning_rate / (1 - beta_1**t) * m / u
    return p


def nadam(p, grads, learning_rate, beta_1, beta_2, epsilon, momentum_decay, weight_decay):
    """Run the NAdam algorithm in the table of torch's documentation."""
    m, v, product = 0.0, 0.0, 1.0
    for t, g in enumerate(grads, 1):
        g = g + weight_decay * p
        mu, following = (
            beta_1 * (1 - 0.5 * 0.96 ** (step * momentum_decay)) for step in (t, t + 1)
        )
        product *= mu
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        m_hat = following * m / (1 - product * following) + (1 - mu) * g / (1 - product)
        p = p - learning_rate * m_hat / (np.sqrt(v / (1 - beta_2**t)) + epsilon)
    return p


def lamb(p, grads, learning_rate, beta_1, beta_2, epsilon, weight_decay):
    """Run algorithm 2 of arXiv 1904.00962."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        r = (m / (1 - beta_1**t)) / (np.sqrt(v / (1 - beta_2**t)) + epsilon) + weight_decay * p
        p = p - learning_rate * np.linalg.norm(p) / np.linalg.norm(r) * r
    return p


def lion(p, grads, learning_rate, beta_1, beta_2, weight_decay):
    """Run program 1 of arXiv 2302.06675."""
    m = 0.0
    for g in grads:
        step = np.sign(beta_1 * m + (1 - beta_1) * g)
        m = beta_2 * m + (1 - beta_2) * g
        p = p - learning_rate * (step + weight_decay * p)
    return p


def ftrl(p, grads, learning_rate, initial_accumulator_value, l1, l2, l2_shrinkage, beta):
    """Run FTRL as in Keras, with the learning rate power -1/2."""
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
    "Adadelta": adadelta,
    "Adafactor": adafactor,
    "Adamax": adamax,
    "Nadam": nadam,
    "Lamb": lamb,
    "Lion": lion,
    "Ftrl": ftrl,
}


def test_every_optimizer_has_a_case():
    assert {type(optimizer).__name__ for optimizer in CONFIGURATIONS} == set(BY_NAME)


def random(seed, size, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def kind_of(optimizer):
    return type(optimizer).__name__


def numpy_rule(optimizer):
    slots = optimizer.slots(), optimizer.initial(), None, optimizer.slot_shapes
    return Rule(on_arrays(optimizer.formula()), Kind.OPTIMIZER, *slots)


def numba_rule(optimizer):
    from strategy.rules import element_by_element

    slots = optimizer.slots()
    apply = element_by_element(optimizer.formula(), len(slots))
    return Rule(apply, Kind.OPTIMIZER, slots, optimizer.initial())


def slots_of(rule, shape, dtype):
    shape = shape if isinstance(shape, tuple) else (shape,)
    shapes = zip(rule.slots, rule.shapes_of_slots(shape), strict=True)
    return [np.full(own, rule.initial.get(name, 0.0), dtype) for name, own in shapes]


def update(rule, param, grad, numbers=(), slots=(), cuts=()):
    """Apply a rule to the pieces between the cuts. The gradient is read-only."""
    edges = [0, *sorted(cuts), param.size]
    grad.flags.writeable = False
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        rule.apply(Update(param[part], grad[part], [slot[part] for slot in slots], numbers))


def trained(optimizer, dtype, steps=20, size=500, first=(), make=numpy_rule):
    """Return the variable and its slots after some steps. The variable begins with ``first``."""
    rule = make(optimizer)
    param, slots = random(3, size, dtype), slots_of(rule, size, dtype)
    param[: len(first)] = first
    for step in range(1, steps + 1):
        numbers = optimizer.numbers(optimizer.learning_rate, step)
        update(rule, param, random(10 + step, size, dtype), numbers, slots)
    return [param, *slots]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
@CASES
def test_references(optimizer, dtype, tolerance):
    param, *_ = trained(optimizer, dtype)
    start, *grads = [random(seed, 500, dtype).astype(float) for seed in (3, *range(11, 31))]
    reference = REFERENCES[kind_of(optimizer)]
    expected = reference(
        start, grads, learning_rate=optimizer.learning_rate, **optimizer.hyperparameters
    )
    np.testing.assert_allclose(param, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@ELEMENTWISE
def test_compiled_rules_give_the_bits_of_numpy(optimizer, dtype):
    with np.errstate(invalid="ignore"):
        results = [
            trained(optimizer, dtype, first=(np.inf, -np.inf, np.nan), make=make)
            for make in (numpy_rule, numba_rule)
        ]
    for plain, compiled in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, compiled)


TORCH = [
    (optimizers.SGD(0.1, weight_decay=0.1), "SGD", {"weight_decay": 0.1}),
    (optimizers.SGD(0.1, momentum=0.9), "SGD", {"momentum": 0.9}),
    (
        optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        "SGD",
        {"momentum": 0.9, "nesterov": True},
    ),
    (optimizers.Adagrad(0.1), "Adagrad", {"initial_accumulator_value": 0.1, "eps": 1e-7}),
    (
        optimizers.RMSprop(0.1, 0.9, 0.5, 1e-3, True),
        "RMSprop",
        {"alpha": 0.9, "momentum": 0.5, "eps": 1e-3, "centered": True},
    ),
    (optimizers.Adam(0.1, weight_decay=0.01), "Adam", {"eps": 1e-7, "weight_decay": 0.01}),
    (optimizers.Adam(0.1, amsgrad=True), "Adam", {"eps": 1e-7, "amsgrad": True}),
    (optimizers.AdamW(0.1, weight_decay=0.2), "AdamW", {"eps": 1e-7, "weight_decay": 0.2}),
    (
        optimizers.Adadelta(0.1, weight_decay=0.1),
        "Adadelta",
        {"rho": 0.95, "eps": 1e-7, "weight_decay": 0.1},
    ),
    (optimizers.Adamax(0.1, weight_decay=0.1), "Adamax", {"eps": 1e-7, "weight_decay": 0.1}),
    (optimizers.Nadam(0.1), "NAdam", {"eps": 1e-7}),
    (
        optimizers.Nadam(0.1, momentum_decay=0.1, weight_decay=0.1),
        "NAdam",
        {"eps": 1e-7, "momentum_decay": 0.1, "weight_decay": 0.1},
    ),
]


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(("optimizer", "name", "options"), TORCH, ids=repr)
def test_torch_takes_the_same_steps(optimizer, name, options):
    import torch

    param, *_ = trained(optimizer, np.float64, steps=100)
    theirs = torch.tensor(random(3, 500))
    peer = getattr(torch.optim, name)([theirs], lr=0.1, **options)
    for step in range(100):
        theirs.grad = torch.tensor(random(11 + step, 500))
        peer.step()
    tolerance = 1e-6 if name == "NAdam" else 1e-9  # torch's NAdam keeps a product in float32
    np.testing.assert_allclose(param, theirs.numpy(), rtol=tolerance, atol=tolerance)


SHAPES = [(500,), (20, 25), (4, 5, 25), (1, 500), (500, 1), ()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_adafactor_of_any_shape(shape, dtype, tolerance):
    adafactor = optimizers.Adafactor(0.1, weight_decay=0.1)
    start, *grads = [random(seed, shape, dtype) for seed in (3, *range(11, 31))]
    rule, param = numpy_rule(adafactor), np.array(start)
    slots = slots_of(rule, shape, dtype)
    for step, grad in enumerate(grads, 1):
        rule.apply(Update(param, grad, slots, adafactor.numbers(0.1, step)))
    expected = REFERENCES["Adafactor"](start, grads, 0.1, **adafactor.hyperparameters)
    np.testing.assert_allclose(param, expected, rtol=tolerance, atol=tolerance)
    if len(shape) > 1:
        size = np.prod(shape)
        assert sum(slot.size for slot in slots) == size // shape[-1] + size // shape[-2]


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "d": 2.0, "beta2_decay": -0.5}])
@pytest.mark.parametrize("shape", SHAPES)
def test_adafactor_takes_the_steps_of_torch(shape, options):
    import torch

    names = {"d": "clip_threshold", "beta2_decay": "beta_2_decay"}
    adafactor = optimizers.Adafactor(
        0.1, **{names.get(name, name): value for name, value in options.items()}
    )
    rule, param = numpy_rule(adafactor), np.array(random(3, shape))
    slots, theirs = slots_of(rule, shape, float), torch.tensor(param)
    peer = torch.optim.Adafactor([theirs], lr=0.1, **options)
    for step in range(1, 101):
        grad = np.asarray(random(10 + step, shape))
        rule.apply(Update(param, grad, slots, adafactor.numbers(0.1, step)))
        theirs.grad = torch.tensor(grad)
        peer.step()
    # torch keeps the number of steps in float32.
    np.testing.assert_allclose(param, theirs.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")
@pytest.mark.parametrize(("name", "weight_decay"), [("Lion", 0.0), ("Lion", 0.1), ("Lamb", 0.0)])
def test_keras_takes_the_same_steps(monkeypatch, name, weight_decay):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    import keras

    optimizer = getattr(optimizers, name)(0.01, weight_decay=weight_decay)
    param, *_ = trained(optimizer, np.float64, steps=100)
    theirs = keras.Variable(random(3, 500), dtype="float64")
    peer = getattr(keras.optimizers, name)(0.01, weight_decay=weight_decay or None)
    peer.build([theirs])
    for step in range(100):
        grad = keras.ops.convert_to_tensor(random(11 + step, 500), dtype="float64")
        peer.apply([grad], [theirs])
    # Keras keeps the learning rate and the powers of betas in float32.
    np.testing.assert_allclose(param, keras.ops.convert_to_numpy(theirs), rtol=1e-5, atol=1e-5)


def test_the_first_step_of_adam_has_the_length_of_the_learning_rate():
    adam, grad = optimizers.Adam(0.01), np.array([1e-3, -5.0, 70.0])
    param, rule = np.zeros(3), numpy_rule(adam)
    update(rule, param, grad, adam.numbers(0.01, 1), slots_of(rule, 3, float))
    np.testing.assert_allclose(param, -0.01 * np.sign(grad), rtol=1e-3)


def test_ftrl_leaves_weights_of_little_use_at_zero():
    ftrl = optimizers.Ftrl(0.1, l1=1.0)
    rule, param = numpy_rule(ftrl), np.zeros(2)
    slots = slots_of(rule, 2, float)
    for step in range(1, 4):
        update(rule, param, np.array([0.1, 1.0]), ftrl.numbers(0.1, step), slots)
    assert param[0] == 0
    assert param[1] < 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8, np.complex64])
def test_plain_changes(dtype):
    rng = np.random.default_rng(4)
    param, change = (rng.integers(0, 100, 50).astype(dtype) for _ in range(2))
    for rule, expected in ((ASSIGN, change), (ADD, param + change), (SUB, param - change)):
        result = param.copy()
        update(rule, result, change)
        np.testing.assert_array_equal(result, expected)


@settings(deadline=None, max_examples=60)
@given(
    optimizer=st.sampled_from([one for one in CONFIGURATIONS if not one.needs_all]),
    size=st.integers(1, 200),
    step=st.integers(1, 1000),
    dtype=st.sampled_from([np.float32, np.float64]),
    data=st.data(),
)
def test_pieces_give_the_bits_of_the_whole(optimizer, size, step, dtype, data):
    cuts = data.draw(st.lists(st.integers(0, size), max_size=5))
    rule, numbers = numpy_rule(optimizer), optimizer.numbers(0.1, step)
    grad = random(7, size, dtype)
    results = []
    for use in ((), cuts):
        param = random(8, size, dtype)
        slots = [abs(random(9, size, dtype)) for _ in rule.slots]
        update(rule, param, grad, numbers, slots, use)
        results.append([param, *slots])
    for whole, pieces in zip(*results, strict=True):
        np.testing.assert_array_equal(whole, pieces)


@pytest.mark.parametrize("width", [1, 40, 20_000])
def test_rows_of_any_width_take_little_memory(width):
    optimizer, rows = optimizers.Adam(0.01), 6_000_000 // width
    tables = [np.zeros((rows, width), np.float32) for _ in range(3)]
    flat = [np.zeros(rows * width, np.float32) for _ in tables]
    ids, grad = np.arange(rows), np.ones(rows * width, np.float32)
    rule, numbers = numpy_rule(optimizer), [optimizer.numbers(0.01, step) for step in (1, 2)]
    for step in range(2):
        update(rule, flat[0], grad, numbers[step], flat[1:])
    change_rows(rule, tables, ids, grad, numbers[0])  # compiles the rule
    tracemalloc.start()
    try:
        change_rows(rule, tables, ids, grad, numbers[1])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 << 20
    for table, expected in zip(tables, flat, strict=True):
        np.testing.assert_array_equal(table.reshape(-1), expected)
